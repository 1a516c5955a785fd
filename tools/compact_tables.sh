#!/bin/sh
# Writes the compact tables of conf/compute again, or those whose names are given: tools/compact_tables.sh DIR [NAME...]
# DIR is systems/data of aiconfigurator-core 0.12.0 (pip install aiconfigurator-core==0.12.0); a minute in all.
set -e
data=$1
shift
while read -r gpu folder hw engine version name; do
    name=${name:-${gpu}_$engine}
    if [ $# -gt 0 ]; then
        case " $* " in *" $name "*) ;; *) continue ;; esac
    fi
    python -m pdsim profile "hw=$hw" --from "$data/$folder" --tables "$engine:$version" --compact h200_torch \
        --name "$name" --to conf/compute
done <<TABLES
a100 a100_sxm 8xa100 vllm 0.14.0
a100 a100_sxm 8xa100 sglang 0.5.10
a100 a100_sxm 8xa100 trtllm 1.0.0
h100 h100_sxm 8xh100 vllm 0.24.0
h100 h100_sxm 8xh100 sglang 0.5.14
h100 h100_sxm 8xh100 trtllm 1.3.0rc20
h200 h200_sxm 8xh200 vllm 0.24.0
h200 h200_sxm 8xh200 sglang 0.5.14 h200_sglang_table
h200 h200_sxm 8xh200 trtllm 1.3.0rc20
b200 b200_sxm 8xb200 vllm 0.24.0
b200 b200_sxm 8xb200 sglang 0.5.14
b200 b200_sxm 8xb200 trtllm 1.3.0rc20
b300 b300_sxm 8xb300 vllm 0.24.0
b300 b300_sxm 8xb300 sglang 0.5.14
b300 b300_sxm 8xb300 trtllm 1.3.0rc20
gb200 gb200 4xgb200 vllm 0.24.0
gb200 gb200 4xgb200 sglang 0.5.14
gb200 gb200 4xgb200 trtllm 1.3.0rc20
gb300 gb300 4xgb300 vllm 0.24.0
gb300 gb300 4xgb300 sglang 0.5.14
gb300 gb300 4xgb300 trtllm 1.3.0rc20
l40s l40s 8xl40s vllm 0.24.0
l40s l40s 8xl40s sglang 0.5.14
l40s l40s 8xl40s trtllm 1.3.0rc20
TABLES
