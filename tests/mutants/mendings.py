"""Defects that were mended, and the test of each, which fails when the mending is taken out again.

    python -m tests.mutants.mendings [WORD ...]

takes each mending out of a copy of the code, one at a time, and runs its test there: five minutes for all of them.
It prints what the test says then, and ends with 1 if one passes.  *WORD*s choose the mendings in whose name one of
them is.

Names say where a defect was found: T with its number is a point of an independent trial, D the campaigns of
`experiment=faults`, F what those took for a violation and is none.  D1 to D4 are mutants
(`tests/mutants/catalog.py`); the tests of D5, D7, D8 and D11 take their mendings out themselves.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["MENDINGS", "ROOT", "Mending", "main"]

ROOT = Path(__file__).parents[2]
COPIED = ("pdsim", "backends", "experiments", "benchmarks", "tools", "conf", "tests")
"""What a mending may be taken out of; all else is linked to."""


class Mending(NamedTuple):
    """A *defect* that was mended: *test* fails if *text*, which is once in *file*, reads *without* instead."""

    name: str
    defect: str
    test: str
    file: str
    text: str
    without: str


_FAULTS = "tests/experiments/test_faults.py"
_SERVING = "tests/serving/test_faults.py"
_TRUST = "tests/backends/test_trust.py"
_KEYS = "tests/backends/test_authentication.py"
_CAUSES = "tests/experiments/test_faults_causes.py"

MENDINGS = (
    # --- the points of the trial by others
    Mending("T1 margins", "rounding chose the form of a calibration",
         "tests/calibration/test_transfers.py::test_of_two_forms_that_say_the_same_rounding_does_not_choose",
         "pdsim/calibration/transfers.py",
         "enough = means[close].min() + NEGLIGIBLE", "enough = means[close].min()"),
    Mending("T1 starts", "rounding chose among searches that ended equally well",
         "tests/calibration/test_transfers.py::test_of_two_starts_that_end_equally_well_rounding_does_not_choose",
         "pdsim/calibration/transfers.py",
         "results) * (1.0 + EQUAL) + len(points) * NEGLIGIBLE**4", "results)"),
    Mending("T1 cells", "rounding chose among cells of equal loss",
         "tests/calibration/test_transfers.py::test_among_cells_of_equal_loss_rounding_does_not_choose",
         "pdsim/calibration/transfers.py", "* (1.0 + _SAME) + samples * _SAME\n", "\n"),
    Mending("T1 null space", "rounding chose the parameter to give up",
         "tests/calibration/test_transfers.py"
         "::test_of_three_parameters_that_are_one_number_rounding_does_not_choose_which_to_give_up",
         "pdsim/calibration/transfers.py",
         "np.sqrt((rows[rank:] ** 2).sum(axis=0))", "abs(rows[-1])"),
    Mending("T2 incarnation", "a new process took an introduction that was meant for its dead predecessor",
         f"{_SERVING}::test_both_sides_started_again_at_once_connect_again",
         "pdsim/serving/rank_process.py", "if message.started == self.started:", "if message.incarnation:"),
    Mending("T3 I5 loss", "any loss explained any failure",
         f"{_CAUSES}::test_a_loss_explains_what_its_instance_was_serving",
         "experiments/faults/causes.py",
         " and named[0] in past.instances and self._is_out(named[0], past.began, past.ended)", ""),
    Mending("T3 I5 slow", "anything slow explained any time-out",
         f"{_CAUSES}::test_a_timeout_is_explained_by_what_slowed_its_own_instances",
         "experiments/faults/causes.py",
         "windows = [self._disturbed[name] for name in instances if name in self._disturbed]",
         "windows = list(self._disturbed.values())"),
    Mending("T3 I9", "a live pair that serves no probe was no violation",
         f"{_CAUSES}::test_a_pair_that_lives_must_serve_its_probe",
         "experiments/faults/causes.py",
         'if status != "ok" and not {prefill, decode} & dead:', "if not status:"),
    Mending("T4 dropped rooms", "`dp_rank=query` kept rooms that were dropped",
         "tests/serving/test_room_lookup.py::test_a_room_that_is_given_up_in_the_queue_is_not_kept",
         "pdsim/serving/handoff/push.py", "        self._fresh.pop(room, None)\n", ""),
    Mending("T6 text", "a type that is not UTF-8 raised what is not documented",
         "tests/kv/test_messages.py::test_known_seeds_are_refused_and_nothing_else",
         "pdsim/kv/messages.py", "except (msgspec.MsgspecError, ValueError) as error:",
         "except (msgspec.ValidationError, msgspec.DecodeError) as error:"),
    Mending("T6 one message", "one message ended a rank",
         f"{_SERVING}::test_no_message_of_a_stranger_ends_a_rank",
         "pdsim/serving/rank_process.py",
         "            self.refuse(sender, str(error))\n            return\n        if sender",
         "            raise\n        if sender"),
    Mending("T6 forged stop", "a peer's rank could stop the run",
         f"{_SERVING}::test_a_rank_may_not_stop_another_instance_nor_the_router",
         "pdsim/serving/rank_process.py",
         "if sender not in (ROUTER, self._leader):", "if not sender:"),
    Mending("T6 keys", "whoever found the port could speak to a rank",
         f"{_KEYS}::test_who_has_keys_of_another_job_is_not_heard_and_counted",
         "backends/base/zmq_channel.py", "self._names.get(question[-1])", "self._names.get(question[-1], 'a')"),
    Mending("T6 frames", "a message of too many frames was taken",
         f"{_KEYS}::test_frames_that_are_too_many_are_refused",
         "backends/base/zmq_channel.py", "if len(topics) > 1:", "if len(topics) > 9:"),
    Mending("T6 size", "a message might have any size",
         f"{_KEYS}::test_a_message_that_is_too_large_for_the_receiver_ends_the_connection",
         "backends/base/zmq_channel.py", "        self._socket.maxmsgsize = LARGEST\n", ""),
    Mending("T6 queue", "messages that nobody read filled the memory",
         f"{_KEYS}::test_more_than_a_program_reads_waits_and_nothing_is_lost",
         "backends/base/zmq_channel.py", "            if self._full():", "            if False:"),
    Mending("T6 loopback", "ranks listened on all interfaces",
         "tests/backends/test_engines.py::test_everything_listens_on_loopback_only_except_mooncake",
         "backends/jobs/launcher.py", 'bind: str = "127.0.0.1",', 'bind: str = "0.0.0.0",'),
    Mending("T7 router", "of a killed router the raw log was printed",
         f"{_TRUST}::test_a_killed_router_gives_one_line_for_each_request",
         "experiments/serve/__init__.py",
         'return next(iter(rank.error.splitlines()), "ended without a result")', "return rank.error"),
    Mending("T7 hang", "a rank that hangs held the run for an hour",
         f"{_TRUST}::test_a_rank_whose_clock_hangs_is_ended",
         "backends/jobs/launcher.py", "            self._end_silent()\n", ""),
    Mending("T7 stopped", "a rank that was stopped held the run for an hour",
         f"{_TRUST}::test_a_stopped_rank_ends_the_run_with_results_and_the_reason",
         "backends/jobs/launcher.py", "            self._end_silent()\n", ""),
    Mending("T8 utilisation", "a link that was stalled to the end: ZeroDivisionError",
         "tests/experiments/test_slow_link.py::test_a_link_that_is_changed_to_the_end_has_a_utilisation",
         "pdsim/sim/model.py", "links[link.name] = carried / (link.nominal * seconds)",
         "links[link.name] = carried / (link.capacity * seconds)"),
    Mending("T8 progress", "requests whose writes went on were called stalled",
         "tests/experiments/test_slow_link.py::test_requests_whose_writes_go_on_are_not_stalled",
         "pdsim/serving/prefill_worker.py", "return written or computed or", "return computed or"),
    Mending("T8 SIGTERM", "SIGTERM while a billion requests are drawn left the run unmarked",
         "tests/test_cli.py::test_sigterm_ends_a_run_while_its_requests_are_drawn",
         "pdsim/cli/main.py", "    terminable()\n    _print", "    _print"),
    Mending("T8 imports", "Ctrl-C during imports printed a traceback",
         "tests/test_cli.py::test_ctrl_c_during_imports_is_one_line",
         "pdsim/__main__.py", "    beginning()\n", ""),
    Mending("T8 results", "YAML errors of result folders got out",
         "tests/test_fuzz_files.py::test_files_of_results_that_are_none",
         "pdsim/results/schema.py",
         "except (yaml.YAMLError, OSError, TypeError, ValueError, RecursionError) as error:",
         "except OSError as error:"),
    Mending("T8 tools", "a row of another tool that was cut short raised what is not documented",
         "tests/test_fuzz_files.py::test_what_is_changed_is_refused_as_documented",
         "pdsim/calibration/importers.py",
         "except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError, csv.Error) as error:",
         "except csv.Error as error:"),
    # --- what the campaigns found
    Mending("D6", "what a follower said of an incarnation that was over was kept",
         f"{_FAULTS}::test_a_rank_that_is_ready_for_a_decode_instance_that_was_lost_since_is_not_counted",
         "pdsim/serving/handoff/push.py", "if self.readiness.lost(incarnation):", "if not incarnation:"),
    Mending("D9", "a room that only prefill called written ended as stalled",
         f"{_FAULTS}::test_a_room_that_only_prefill_calls_written_fails_with_its_prefill_instance",
         "pdsim/serving/handoff/push.py",
         "if scheduler.quarantine(room):", "if scheduler.quarantine(room) and not number:"),
    Mending("D9 real", "seed 130 of the real faults: a notice that died with its sender stalled a request",
            "tests/test_faults_real.py::test_a_notice_that_dies_with_its_sender_stalls_no_request",
            "pdsim/serving/handoff/push.py",
            "if scheduler.quarantine(room):", "if scheduler.quarantine(room) and not number:"),
    Mending("D10", "what a leader that was gone had asked for was kept for ever",
         "tests/serving/test_stale_destinations.py::test_what_a_leader_that_is_gone_has_asked_for_is_not_kept",
         "pdsim/serving/prefill_worker.py", "            if not self._ahead:", "            if False:"),
    Mending("D12", "a queue behind slots in quarantine stalled",
         f"{_FAULTS}::test_a_request_that_waits_for_a_slot_in_quarantine_fails_for_that",
         "pdsim/serving/decode.py", "while self._queue and not self.preemption.waiting:",
         "while self._queue and not self.preemption.waiting and self.handoff.has_slot():"),
    Mending("D13", "a request whose instance was asked about it, and was lost, ended as stalled",
         f"{_FAULTS}::test_a_request_ends_when_the_instance_that_is_asked_about_it_is_lost_too",
         "pdsim/serving/router.py", "(request.lost or not request.prefilled)", "not request.prefilled"),
    Mending("D retraction", "requests were called stalled while retracted KV moved",
         f"{_FAULTS}::test_what_the_campaign_of_100_000_found_is_mended",
         "pdsim/serving/decode.py", " or self._retraction.under_way", ""),
    Mending("D14", "a forward chosen ahead wrote rooms that had been given up",
         f"{_FAULTS}::test_a_forward_that_was_chosen_ahead_leaves_out_what_was_given_up_since",
         "pdsim/serving/prefill.py",
         "self._still_wanted(self._next) or self.next_forward()", "self._next or self.next_forward()"),
    Mending("D15", "posts of one instant overtook each other",
         f"{_FAULTS}::test_posts_of_one_instant_keep_their_order",
         "pdsim/serving/prefill_worker.py",
         "        chunks, last = self._unposted.popleft()\n", "        chunks, last = self._unposted.pop()\n"),
    Mending("D16", "a queue behind revoked rooms stalled",
         f"{_FAULTS}::test_a_request_that_waits_for_pages_of_a_revoked_room_fails_for_that",
         "pdsim/serving/handoff/pull.py", "        self._scheduler.pages.quarantine(number)\n", ""),
    Mending("D17", "posts whose turn had passed in a pause were overtaken",
         f"{_FAULTS}::test_posts_whose_turn_has_passed_in_a_pause_are_not_overtaken",
         "pdsim/serving/prefill_worker.py", "if not self._unposted:", "if True:"),
    Mending("D18", "a wire made while its link was cut had no rate: ZeroDivisionError",
         "tests/sim/test_wire.py::test_what_connects_while_its_link_is_cut_is_as_fast_as_others_afterwards",
         "pdsim/sim/wire.py", "link.nominal / path.links", "link.capacity / path.links"),
    Mending("D19", "a reader kept what it had counted of incarnations that were over",
         f"{_FAULTS}::test_what_the_campaign_of_pulled_handoffs_found_is_mended",
         "pdsim/serving/handoff/pull.py", "        self.readiness.keep(self._engine.incarnation)\n", ""),
    Mending("D20", "an earlier introduction took the place of the later one",
         f"{_FAULTS}::test_what_the_campaign_of_pulled_handoffs_found_is_mended",
         "pdsim/serving/membership.py", "if kept is None or _epochs(kept) <= _epochs(message):", "if message:"),
    Mending("D21", "a request that started anew kept that its KV had been collected, and stalled",
            "tests/serving/test_stale_destinations.py::test_a_request_that_starts_anew_has_nothing_of_its_last_room",
            "pdsim/serving/router.py", "request.answered = request.prefilled = False", "request.answered = False"),
    Mending("D22", "a campaign told to end while its processes were started ended with RuntimeError",
         f"{_FAULTS}::test_a_campaign_that_is_told_to_end_while_its_processes_are_started_ends_for_that_reason",
         "experiments/faults/__init__.py", "pool.shutdown(wait=False, cancel_futures=True)",
         "pool.shutdown(cancel_futures=True)"),
    # --- what the trial called violations, and are none
    Mending("F1", "a transfer behind another over a slow link had no cause to time out",
         f"{_FAULTS}::test_what_is_behind_a_transfer_over_a_slow_link_may_time_out",
         "experiments/faults/causes.py", " or self._behind(past)", ""),
    Mending("F2", "a lease that a router's queue outlasts had no cause to end",
         f"{_FAULTS}::test_what_the_campaign_of_pulled_handoffs_found_is_mended",
         "experiments/faults/causes.py", "return self._waits_at_the_router(past) or", "return"),
    Mending("F3", "a rank that nobody reads from, and that heard of its peers late, leaked",
         f"{_FAULTS}::test_a_rank_that_nobody_reads_from_may_hear_of_a_decode_instance_late",
         "pdsim/verify/leaks.py", "(self._lost or name in self._late)", "self._lost"),
)  # fmt: skip


def main(words: Sequence[str]) -> int:
    """Try the mendings that *words* choose: with all of them every test must pass, without its own each must fail.

    Return 1 if one does not.
    """
    chosen = [each for each in MENDINGS if not words or any(word in each.name for word in words)]
    status, said = tried(None, list(dict.fromkeys(each.test for each in chosen)))
    if status:
        sys.stdout.write(f"with all mendings: {said}\n")
        return 1
    wrong = 0
    for each in chosen:
        status, said = tried(each, [each.test])
        wrong += status != 1  # 2 and more: no test was run
        sys.stdout.write(
            f"{each.name}: {each.defect}: {'fails' if status == 1 else 'DOES NOT FAIL'}: {said[:150]}\n"
        )
        sys.stdout.flush()
    return 1 if wrong else 0


def tried(taken_out: Mending | None, tests: Sequence[str]) -> tuple[int, str]:
    """Return the status of pytest on *tests* in a copy of the code, and the first that it says."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for each in ROOT.iterdir():
            if each.name in COPIED:
                shutil.copytree(each, copy / each.name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
            elif not each.name.startswith("."):
                (copy / each.name).symlink_to(each)
        if taken_out is not None:
            file = copy / taken_out.file
            text = file.read_text(encoding="utf-8").replace(taken_out.text, taken_out.without)
            file.write_text(text, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider", "--tb=short", *tests],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
            check=False,
        )
    errors = [line for line in done.stdout.splitlines() if line.startswith("E ")]
    return done.returncode, errors[0] if errors else (done.stdout + done.stderr).strip().rpartition("\n")[2]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
