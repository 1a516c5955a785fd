"""What users paste beside their times speaks for a cause, in the formats of the tools."""

import json

import pytest

from pdsim.calibration.pasted import Fact, facts, variables
from pdsim.config.compose import compose

HW = compose(["hw=2x8xh100", "backend=nixl"]).hw  # cards of 400 Gb/s
# cut at their ends; the cards of the first are columns of their own, those of the second have a legend
FAR = """\
        GPU0    GPU1    mlx5_0  mlx5_1  CPU Affinity    NUMA Affinity
GPU0     X      NV1     PIX     NODE    0-19,40-59      0
GPU1    SYS      X      SYS     SYS     20-39,60-79     1
mlx5_0  PIX     SYS      X      NODE
"""
PLAIN = """\
\x1b[4m\tGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tPHB\tPIX\tPXB\t0-31,64-95\t0\t\tN/A
GPU1\tPHB\t X \tPXB\tPIX\t0-31,64-95\t0\t\tN/A
NIC Legend:
  NIC0: mlx5_bond_0
  NIC1: mlx5_bond_1
"""
IBSTAT = """\
CA 'mlx5_0'
\tCA type: MT4127
\tFirmware version: 26.43.1014
\tPort 1:
\t\tState: Active
\t\tPhysical state: LinkUp
\t\tRate: 25
\t\tLink layer: Ethernet
CA 'mlx5_1'
\tPort 1:
\t\tState: Down
\t\tPhysical state: Disabled
\t\tRate: 40
CA 'mlx5_2'
\tPort 1:
\t\tState: Active
\t\tRate: 200
\t\tLink layer: InfiniBand
"""
DEVINFO = """\
hca_id: mlx5_bond_0
        transport:                      InfiniBand (0)
        fw_ver:                         22.36.1010
                port:   1
                        state:                  PORT_ACTIVE (4)
                        max_mtu:                4096 (5)
                        active_mtu:             1024 (3)
                        link_layer:             Ethernet
                        active_width:           4X (2)
                        active_speed:           25.0 Gbps (32)
                        GID[  3]:               ::ffff:192.0.2.12, RoCE v2
"""
# show_gids; and the same of ibv_devinfo -v
GIDS = """\
DEV     PORT    INDEX   GID                                     IPv4            VER     DEV
---     ----    -----   ---                                     ------------    ---     ---
mlx5_0  1       0       fe80:0000:0000:0000:0a3d:0aff:fe3d:0001                 v1      eth0
mlx5_0  1       1       fe80:0000:0000:0000:0a3d:0aff:fe3d:0001                 v2      eth0
mlx5_0  1       3       0000:0000:0000:0000:0000:ffff:c000:020c 192.0.2.12      v2      eth0
mlx5_1  1       0       fe80:0000:0000:0000:0a3d:0aff:fe3d:0002                 v1      eth1
"""
VERBOSE = """\
hca_id: mlx5_0
                        state:                  PORT_ACTIVE (4)
                        GID[  0]:               fe80::a3d:aff:fe3d:1, RoCE v1
                        GID[  1]:               fe80::a3d:aff:fe3d:1, RoCE v2
                        GID[  3]:               ::ffff:192.0.2.12, RoCE v2
"""
LANES = "parser.c:1916 UCX  INFO  UCX_* env variables: UCX_LOG_LEVEL=info\nucp_worker.c:1867 UCX INFO ep_cfg[2]: "
TABLE = """\
| perftest cfg#1 | remote memory write by ucp_put*(multi) from cuda/GPU0 to cuda/GPU1 |
|     0 | no data fetch      |               |
| 1..inf | software emulation | {by} |
"""
# of NIXL 1.5.1 with UCX 1.23 on loopback
TABLES = """\
   | a self cfg#0                                             |
   | remote memory write by ucp_put* from host memory to host |
   +--------+-------------+-----------------------------------+
   | Range  | Description |              Config               |
   | 0..inf | zero-copy   | {by} |
   | a self cfg#0                                    |
   | active message by ucp_am_send* from host memory |
   |          0 | short              | tcp/lo        |
   | 16516..inf | multi-frag copy-in | tcp/lo        |
"""
EMULATED = "UCX chose software emulation, "


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("", ["mlx5_1 has GIDs of RoCE v1 alone, not routed or marked (ECN)"]),
        ("UCX_NET_DEVICES=mlx5_0:1\n", []),
        ("UCX_NET_DEVICES=mlx5_0:1\nUCX_IB_GID_INDEX=auto\n", []),
        ("UCX_NET_DEVICES=mlx5_0:1\nMC_GID_INDEX=3\n", []),
        (
            "UCX_IB_GID_INDEX=0\n",
            [
                "UCX_IB_GID_INDEX=0 of mlx5_0 is RoCE v1, not routed or marked; 3 is v2 of IPv4",
                "UCX_IB_GID_INDEX=0 of mlx5_1 is RoCE v1, not routed or marked",
            ],
        ),
        (
            "MC_GID_INDEX=1\n",
            [
                "MC_GID_INDEX=1 of mlx5_0 is link-local; 3 is v2 of IPv4",
                "MC_GID_INDEX=1, which mlx5_1 does not have",
            ],
        ),
    ],
)
def test_the_index_of_a_gid_is_judged_by_its_table(before, said):
    assert [one.what for one in facts(before + GIDS, HW, local=False)] == said
    assert not facts(before + GIDS, HW, local=True)


def test_both_tools_list_the_same_gids():
    same = {
        one.what
        for text in (VERBOSE, GIDS)
        for one in facts(f"UCX_NET_DEVICES=mlx5_0\nUCX_IB_GID_INDEX=0\n{text}", HW, local=False)
    }
    assert same == {"UCX_IB_GID_INDEX=0 of mlx5_0 is RoCE v1, not routed or marked; 3 is v2 of IPv4"}


@pytest.mark.parametrize(
    ("text", "local", "said"),
    [
        (FAR, False, [Fact("slow GPU memory", "GPU1 reaches mlx5_0 across SYS")]),
        (FAR, True, []),
        (PLAIN, False, []),
        (PLAIN, True, [Fact("not over NVLink", "GPUs are joined by PHB")]),
        (
            f"UCX_NET_DEVICES=mlx5_bond_1:1\n{PLAIN}",
            False,
            [Fact("slow wire", "GPU0 and mlx5_bond_1 are PXB, mlx5_bond_0 is PIX")],
        ),
        (
            f"--device_name=mlx5_1\n{FAR}",
            False,
            [
                Fact("slow wire", "GPU0 and mlx5_1 are NODE, mlx5_0 is PIX"),
                Fact("slow GPU memory", "GPU0 reaches mlx5_1 across NODE"),
                Fact("slow GPU memory", "GPU1 reaches mlx5_1 across SYS"),
            ],
        ),
        (
            IBSTAT,
            False,
            [
                Fact("slow wire", "mlx5_1: not active", 1.5),
                Fact("slow wire", "mlx5_2 at 200 Gb/s, hw.nic.rate is of 400", 2.0),
            ],
        ),
        (f"export UCX_NET_DEVICES=mlx5_1:1\n{IBSTAT}", False, [Fact("slow wire", "mlx5_1: not active")]),
        (IBSTAT, True, []),
        (
            DEVINFO,
            False,
            [
                Fact("slow wire", "mlx5_bond_0 sends packets of 1024 bytes, it could of 4096"),
                Fact("slow wire", "mlx5_bond_0 at 100 Gb/s, hw.nic.rate is of 400", 4.0),
            ],
        ),
        (f"{LANES}am(tcp/lo);", False, [Fact("over TCP", "UCX chose tcp for the bytes")]),
        (f"{LANES}tag(tcp/eth0) rma(rc_mlx5/mlx5_0:1 cuda_ipc/cuda)", False, []),
        (f"{LANES}tag(tcp/eth0) rma(rc_mlx5/mlx5_0:1 cuda_ipc/cuda)", True, []),
        ("ENV UCX_TLS=^cuda_ipc", True, [Fact("not over NVLink", "UCX_TLS=^cuda_ipc")]),
        ("ENV UCX_TLS=^cuda_ipc", False, []),
        ("UCX_TLS=rc,cuda_ipc\nUCX_TLS=all", True, []),
        ("UCX INFO ucp_context_0 intra-node cfg#2 rma_am(tcp/eth1) am(tcp/eth1 cuda_ipc/cuda)", True, []),
        ("UCX INFO a intra-node cfg#1 rma_am(tcp/lo)  amo_am(tcp/lo)  am(tcp/lo tcp/eth0)  ka(tcp/lo)", True,
         [Fact("over TCP", "UCX chose tcp for the bytes")]),
        (TABLES.format(by="cma/memory"), True,
         [Fact("not over NVLink", "UCX chose cma for the bytes, not cuda_ipc")]),
        (TABLES.format(by="52% on tcp/lo and 48% on tcp/eth0"), True,
         [Fact("over TCP", "UCX chose tcp for the bytes")]),
        (TABLE.format(by="tcp/eth0"), False, [Fact("over TCP", "UCX chose tcp for the bytes"),
                                              Fact("slow GPU memory", f"{EMULATED}tcp/eth0")]),
        (
            TABLE.format(by="sysv/memory"),
            True,
            [
                Fact("not over NVLink", "UCX chose sysv for the bytes, not cuda_ipc"),
                Fact("not over NVLink", f"{EMULATED}sysv/memory"),
            ],
        ),
        ("I1 transfer_engine.cpp:153] Topology discovery complete. Found 0 HCAs.", False,
         [Fact("over TCP", "no RDMA device was found")]),
        ("rdma_transport.cpp:63] [RDMA] Relaxed ordering disabled via MC_IB_PCI_RELAXED_ORDERING=0.", False,
         [Fact("slow GPU memory", "relaxed ordering is off")]),
        ("perftest.c:800  UCX  WARN  CPU affinity is not set (bound to 64 cpus).", False,
         [Fact("slow host", "processes are not pinned (CPU affinity is not set)")]),
    ],
)  # fmt: skip
def test_each_tool_speaks_for_the_cause_that_it_shows(text, local, said):
    assert facts(text, HW, local) == said


def test_rails_that_carry_no_bytes_are_counted():
    line = "UCX INFO 0x1c5f inter-node cfg#0 tag(rc_mlx5/mlx5_0:1 rc_mlx5/mlx5_1:1) rma(rc_mlx5/mlx5_0:1)"
    two = compose(["hw=2x8xh100", "backend=nixl", "hw.nic.rails=2"]).hw
    assert facts(line, two, False) == [Fact("slow wire", "bytes go over 1 of 2 rails", 2.0)]
    assert facts(line, HW, False) == []
    port = "CA '{}'\n\tSystem image GUID: {}\n\tPort 1:\n\t\tState: Active\n\t\tRate: 400\n"
    one = port.format("mlx5_0", "0x8c3b") + port.format("mlx5_1", "0x8c3b")
    assert facts(one, two, False) == [Fact("slow wire", "of 2 devices up to 2 are ports of one card", 2.0)]
    assert facts(one.replace("0x8c3b", "0x58a2", 1), two, False) == facts(one, HW, False) == []


def test_variables_are_read_wherever_they_are_set():
    text = "-x UCX_TLS=rc,cuda_copy\nexport NCCL_IB_HCA='mlx5_0'; MC_GID_INDEX=3 python"
    assert variables(text) == {"UCX_TLS": "rc,cuda_copy", "NCCL_IB_HCA": "mlx5_0", "MC_GID_INDEX": "3"}


@pytest.mark.parametrize(
    ("times", "words", "beside", "before", "after"),
    [
        (0.0112, ["hw=2x8xh100"], FAR, "slow wire, 1.8 times", "slow GPU memory, 1.8 times"),
        (0.0112, ["hw=2x8xh100"], IBSTAT, "slow wire, 1.8 times", "slow wire, 1.8 times"),
        (
            0.0112,
            ["hw=8xh100"],
            TABLE.format(by="sysv/memory"),
            "not over NVLink, 2.3 times",
            "not over NVLink, 2.3 times",
        ),
        (0.16, ["hw=2x8xh100"], "UCX_TLS=tcp,cuda_copy", "over TCP", "over TCP"),
    ],
)
def test_what_is_pasted_decides_where_times_do_not(times, words, beside, before, after, tmp_path, pdsim_prints):
    slow, said = tmp_path / "slow.csv", tmp_path / "said.txt"
    slow.write_text(f"pattern,blocks,size,seconds,memory\npair,1,268435456,{times},gpu")
    said.write_text(beside)
    assert f"likely: {before}" in pdsim_prints("diagnose", slow, *words, "backend=nixl")
    out = pdsim_prints("diagnose", slow, said, *words, "backend=nixl")
    assert f"likely: {after}" in out
    assert f"(speaks for {after.split(',')[0]}" in out
    assert "without it 1 x 256 MiB take" in out


def test_facts_are_part_of_the_answer_and_no_times_are_refused(tmp_path, pdsim_prints, pdsim_refuses):
    both = tmp_path / "post.txt"
    both.write_text(f"KV Transfer metrics: Avg xfer time (ms)=300, Avg MB per transfer=313.0\n{IBSTAT}")
    said = json.loads(pdsim_prints("diagnose", both, "hw=2x8xh100", "backend=nixl_vllm", "--json"))
    assert said["facts"][0] == ["slow wire", "mlx5_1: not active", 1.5]
    assert [one["seen"] != [] for one in said["causes"] if one["cause"] == "slow wire"] == [True]
    both.write_text(IBSTAT)
    why = pdsim_refuses("diagnose", both, "hw=2x8xh100", "backend=nixl")
    assert "holds no times of transfers; name a log or a bench beside it" in why
