"""dweight += dlogits.T @ h for one chunk: the library's addmm beside the kernel of templates/gemm.py.jinja.

    python -m benchmarks.accumulate --shapes 4096x128256,4096x32000,768x50257 --chunk-sizes 256,512,1024,2048

One JSON line per measurement: median milliseconds of each way, the time that reading and writing dweight takes at the
card's bandwidth, and the relative errors of both against float64 on the first 1000 rows of dweight. --sweep also times
other tile configurations.
"""

from __future__ import annotations

import argparse
import json
import statistics

import torch

from flce_inductor import chunking, kernels, runtime

from . import measure

CONFIGS = [
    (128, 256, 64, 8, 3),
    (128, 256, 64, 8, 4),
    (256, 128, 64, 8, 3),
    (128, 128, 64, 8, 3),
    (128, 128, 64, 4, 3),
    (128, 128, 64, 4, 4),
    (128, 128, 128, 8, 2),
]


def milliseconds(work, repeats: int = 10) -> float:
    times = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="4096x128256,4096x32000,768x50257", help="HxV, separated by commas")
    parser.add_argument("--chunk-sizes", default="256,512,1024,2048")
    parser.add_argument("--destinations", default="bfloat16,float32")
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args(argv)
    device, operand = torch.device("cuda"), torch.bfloat16
    origin = measure.about("cuda", "bfloat16")
    default = kernels._gemm_config
    for shape in args.shapes.split(","):
        H, V = map(int, shape.split("x"))
        for C in map(int, args.chunk_sizes.split(",")):
            slab = torch.randn(C, -(-V // 64) * 64, device=device, dtype=operand)[:, :V]
            h = torch.randn(C, H, device=device, dtype=operand)
            head = runtime._Head(h, h.new_empty(V, H), None, None, None, runtime.How(-100, C), runtime.Plan(), None)
            for into in (getattr(torch, name) for name in args.destinations.split(",")):
                dweight = torch.zeros(V, H, device=device, dtype=into)
                path, parts = head.path(into), head.blocks(V)

                def library(dweight=dweight, path=path, parts=parts, slab=slab, h=h):
                    for part in parts:
                        runtime.accumulate_(dweight[part], slab[:, part].t(), h, False, path)

                def ours(dweight=dweight, slab=slab, h=h):
                    kernels.triton_gemm_(dweight, slab.t(), h, False)

                want = slab[:, :1000].double().t() @ h.double()
                row = {"H": H, "V": V, "C": C, "into": str(into).removeprefix("torch.")}
                for name, work in (("library", library), ("triton", ours)):
                    dweight.zero_()
                    work()
                    row[f"{name}_err"] = float((dweight[:1000].double() - want).norm() / want.norm())
                    row[f"{name}_ms"] = round(milliseconds(work), 4)
                row["traffic_ms"] = round(2 * dweight.nbytes / chunking.card(device).bandwidth * 1e3, 4)
                if args.sweep:
                    for config in CONFIGS:
                        kernels._gemm_config = lambda *_, config=config: config
                        try:
                            row[str(config)] = round(milliseconds(ours), 4)
                        except Exception as error:  # out of registers or shared memory
                            row[str(config)] = type(error).__name__
                    kernels._gemm_config = default
                print(json.dumps({**row, **origin}), flush=True)


if __name__ == "__main__":
    main()
