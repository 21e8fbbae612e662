# Rather than without the limit that was meant, PyTorch gets no allocator of ours: the two lines raise.
#: attach plain
#: env CONCERTINA_CONF=limt:1G
#: says CONCERTINA_CONF: limt:1G makes no sense: there is no such key; did you mean limit?
#: ends 1

raise SystemExit(99)
