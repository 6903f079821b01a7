"""All benchmarks, one after the other."""

from tests.bench import (
    bench_aliked,
    bench_detr,
    bench_efficient_loftr,
    bench_mask2former,
    bench_matching,
    bench_position,
    bench_segformer,
    bench_training,
    bench_vit,
)

bench_position.main()
bench_matching.main()
bench_aliked.main()
bench_vit.main()
bench_training.main([])
bench_detr.main()
bench_efficient_loftr.main()
bench_mask2former.main()
bench_segformer.main()
