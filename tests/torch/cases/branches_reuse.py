# graph_capture_record_stream_reuse: within a capture, what other streams have used is used again once they
# are joined, and not before; without the setting only after the capture.
#: attach plain install native
#: torch 2.9
#: env PYTORCH_CUDA_ALLOC_CONF=graph_capture_record_stream_reuse:True
import torch
from case import MIB, pattern

SIZE = 2 * MIB
source = pattern(SIZE).cuda()
unlike = pattern(SIZE, 7).cuda()


def reuses():
    return torch.cuda.memory._snapshot()["allocator_settings"]["graph_capture_record_stream_reuse"]


def captured(others, joined):
    """Whether a block that so many other streams read is used again in the same capture, after so many of
    them were joined; and what each stream read at the replays is right."""
    main, streams = torch.cuda.Stream(), [torch.cuda.Stream() for _ in range(others)]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=main):
        data = source.clone()
        address = data.data_ptr()
        read = []
        for stream in streams:
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                read.append(torch.empty_like(data))
                read[-1].copy_(data)
                data.record_stream(stream)
        del data
        before = torch.empty_like(source)
        for stream in streams[:joined]:
            main.wait_stream(stream)
        # A node that comes after all of them.
        before.copy_(unlike)
        after = torch.empty_like(source)
        after.copy_(unlike)
        for stream in streams:
            main.wait_stream(stream)
    assert before.data_ptr() != address
    for seed in (2, 3):
        host = pattern(SIZE, seed)
        source.copy_(host)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(it.cpu(), host) for it in read)
        assert torch.equal(after.cpu(), pattern(SIZE, 7))
    return after.data_ptr() == address


change = torch.cuda.memory._set_allocator_settings
for others in (1, 3):
    assert reuses()
    assert captured(others, others)
    # One branch goes on.
    assert not captured(others, others - 1)
    change("graph_capture_record_stream_reuse:False")
    assert not reuses()
    assert not captured(others, others)
    change("graph_capture_record_stream_reuse:True")
# A key that is not named stays as it was.
change("roundup_power2_divisions:4")
assert reuses()
