# https://github.com/sgl-project/sglang/blob/main/docs/basic_usage/gpt_oss.md
# means: engine=sglang model=gpt-oss-120b experiment.deployment=colocated experiment.engines=1 parallel.decode.tp=2 parallel.prefill.tp=2 cache=none
# ignored:
python3 -m sglang.launch_server \
  --model-path openai/gpt-oss-120b \
  --tool-server demo \
  --tp 2
