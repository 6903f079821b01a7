"""All benchmarks, one after the other."""

from tests.bench import bench_aliked, bench_matching, bench_position, bench_training, bench_vit

bench_position.main()
bench_matching.main()
bench_aliked.main()
bench_vit.main()
bench_training.main([])
