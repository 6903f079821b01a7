"""All benchmarks, one after the other."""

from tests.bench import bench_aliked, bench_matching

bench_matching.main()
bench_aliked.main()
