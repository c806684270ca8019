# Flags and log for benchmarks on a GPU. Sourced by `make bench-gpu` and benchmarks/card.sh.
# POSIX shell. A rehearsal may set the variables beforehand.

# MLPerf's model, which TorchRec's example trains.
mlperf="--max_table_rows ${max_table_rows:-40000000} --warm_up ${warm_up:-10} --steps ${steps:-30} --repeats 1"
# The defaults of --size large.
large_defaults="--optimizer rowwise_adagrad --first_order 0.192 --dense_bins 64"

# make_big_log DIRECTORY DAYS: make a log of DAYS days, which are hard links to one file of 1 GB.
make_big_log() {
    [ -e "$1" ] || python -m nvt_torchrec.etl synthesize --output_path "$1" --days 1 --rows_per_day 4000000 || return
    for day in $(seq $(($2 - 1))); do ln -f "$1/day_0" "$1/day_$day"; done
}
