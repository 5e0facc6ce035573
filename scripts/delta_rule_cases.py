"""Shapes of the delta rule that `bench_kernels.py linear_attention` and `bench_peers.py` both time."""

WIDTH = 128
WITH_PEERS = {  # tokens, value heads, key heads, one decay a channel, decay, tokens of each document
    "KDA T32768 H32 strong decay": (32768, 32, 32, True, "strong", 32768),
    "KDA T32768 H32 slow decay": (32768, 32, 32, True, "slow", 32768),
    "KDA T8192 H96 strong decay": (8192, 96, 96, True, "strong", 8192),
    "KDA T8192 H96 slow decay": (8192, 96, 96, True, "slow", 8192),
    "KDA 8 documents of 4096 H32 strong decay": (32768, 32, 32, True, "strong", 4096),
    "GDN T32768 H32 slow decay": (32768, 32, 32, False, "slow", 32768),
    "GDN T32768 key heads 16, H32": (32768, 32, 16, False, "slow", 32768),
}
