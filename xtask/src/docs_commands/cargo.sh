#!/bin/bash
# Replaces `cargo` in commands of the docs. `cargo run` starts the program that is already built, and `cargo build` with
# MPI does nothing if the program exists. The real cargo would build other features or another profile. All other
# commands run the real cargo in the repository, where builds are warm.
all=("$@")
case "$*" in
"build --release "*"--features mpi") [ -x "$PROGRAMS/burn-megatron" ] && exit 0 ;;
esac
if [ "$1" = run ]; then
    program=burn-megatron
    shift
    while [ $# -gt 0 ]; do
        case "$1" in
        --release) shift ;;
        --features) [ "$2" = mpi ] || break; shift 2 ;;
        -p) [ "$2" = burn-megatron-bench ] && program=$2; shift 2 ;;
        --bin) program=$2; shift 2 ;;
        --example) program=examples/$2; shift 2 ;;
        --) shift; [ -x "$PROGRAMS/$program" ] && exec "$PROGRAMS/$program" "$@"; break ;;
        *) break ;;
        esac
    done
    if [ $# = 0 ] && [ -x "$PROGRAMS/$program" ]; then
        exec "$PROGRAMS/$program"
    fi
fi
cd "$REPOSITORY" && exec "$CARGO" "${all[@]}"
