#!/bin/sh
# Ten estimates, each with its range and the reason for its width.
#     sh benchmarks/estimates.sh
while read -r arguments; do
    echo "graphrun estimate $arguments"
    # shellcheck disable=SC2086
    graphrun estimate $arguments 2>/dev/null </dev/null | grep -m 1 -A 1 "^predicted" | grep -v "^$"
done <<'ROWS'
flux-dev --hardware h100
flux-dev --hardware rtx4090 --mode model --ram 64G
flux-dev --hardware rtx4090 --precision nf4
flux-dev --hardware l40s --mode leaf --ram 64G
sdxl --hardware rtx3060
sdxl --hardware rtx4080laptop
sd3 --hardware a100 --without text_encoder_3
qwen-image --hardware pro6000
ltx --hardware rtx5090 --attention sage
z-image --hardware m4max-64
ROWS
