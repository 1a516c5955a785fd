# https://github.com/sgl-project/sglang/blob/main/docs/advanced_features/pd_disaggregation.md
# means: engine=sglang model=llama-3.1-8b parallel.prefill.tp=1 parallel.decode.tp=1 cache=sglang backend=nixl_sglang
# ignored:
python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B-Instruct --disaggregation-mode prefill \
  --port 30000 --disaggregation-transfer-backend nixl
python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B-Instruct --disaggregation-mode decode \
  --port 30001 --base-gpu-id 1 --disaggregation-transfer-backend nixl
python -m sglang_router.launch_router --pd-disaggregation --prefill http://127.0.0.1:30000 \
  --decode http://127.0.0.1:30001 --host 0.0.0.0 --port 8000
