//! Tests the output of the ranks.

use std::fs;

use super::run::{Way, both_ways, launch};

#[test]
fn lines_have_a_prefix_and_keep_their_bytes() {
    both_ways(|way| {
        let script = r"case $R in
            3) printf 'a\377\376b\n\nno end' ;;
            4) printf '\r1 %%\r2 %%\rdone\n' ;;
            10) echo oh no >&2; printf 'no end' >&2 ;;
        esac";
        let ended = launch(way, 11, &[], script).end();
        assert_eq!(ended.status.code(), Some(0), "{}", ended.err);
        let lines = |rank: &str| {
            let lines = ended.out.split_inclusive(|byte| *byte == b'\n');
            lines
                .filter(|line| line.starts_with(rank.as_bytes()))
                .collect::<Vec<_>>()
                .concat()
        };
        let bytes = b"[rank  3] a\xff\xfeb\n[rank  3] \n[rank  3] no end\n";
        assert_eq!(lines("[rank  3]"), bytes);
        assert_eq!(
            lines("[rank  4]"),
            b"[rank  4] 1 %\n[rank  4] 2 %\n[rank  4] done\n"
        );
        assert_eq!(ended.err, "[rank 10] oh no\n[rank 10] no end\n");
        let ends = ended.out.iter().filter(|byte| **byte == b'\n');
        assert_eq!(ends.count(), 6, "{:?}", ended.out);
    });
}

/// Writes lines longer than a pipe buffer, lines in parts, and more short lines than mpirun's own tagging can handle.
#[test]
fn lines_are_never_torn() {
    both_ways(|way| {
        let script = "case $R in
            0) for i in 1 2 3; do head -c 300000 /dev/zero | tr '\\0' x; echo; done ;;
            1) seq 1 30000 ;;
            *) for i in 1 2 3 4 5; do printf to; sleep 0.05; echo rn $i; done ;;
        esac";
        let ended = launch(way, 3, &[], script).end();
        ended.code(0);
        let of = |rank: &str| -> Vec<&str> {
            ended
                .out()
                .lines()
                .filter_map(|line| line.strip_prefix(rank))
                .collect()
        };
        assert_eq!(of("[rank 0] "), vec!["x".repeat(300_000); 3]);
        let numbers: Vec<_> = (1..=30_000).map(|number: u32| number.to_string()).collect();
        assert_eq!(of("[rank 1] "), numbers);
        assert_eq!(
            of("[rank 2] "),
            ["torn 1", "torn 2", "torn 3", "torn 4", "torn 5"]
        );
        assert_eq!(ended.out().lines().count(), 3 + 30_000 + 5);
    });
}

#[test]
fn sixty_four_ranks_write_at_once() {
    both_ways(|way| {
        let script = "i=0; while [ $i -lt 100 ]; do echo line $i of $R; i=$((i+1)); done";
        let ended = launch(way, 64, &[], script).end();
        ended.code(0);
        let mut next = [0; 64];
        for line in ended.out().lines() {
            let (rank, line) = line
                .strip_prefix("[rank ")
                .unwrap()
                .split_once("] ")
                .unwrap();
            let rank: usize = rank.trim().parse().unwrap();
            assert_eq!(line, format!("line {} of {rank}", next[rank]));
            next[rank] += 1;
        }
        assert_eq!(next, [100; 64]);
    });
}

#[test]
fn files_get_what_is_not_shown() {
    let folder = std::env::temp_dir().join(format!("burn-megatron-launch-{}", std::process::id()));
    fs::create_dir(&folder).unwrap();
    std::os::unix::fs::symlink("/dev/full", folder.join("rank-2.out")).unwrap();
    let flags = ["--quiet-ranks", "--output-dir", folder.to_str().unwrap()];
    let ended = launch(
        Way::Own,
        3,
        &flags,
        "printf \"out\\rof $R\"; echo err of $R >&2; echo more",
    )
    .end();
    ended.code(0);
    assert_eq!(ended.sorted(), ["[rank 0] of 0more", "[rank 0] out"]);
    let full = format!(
        "error: the output of a rank can no longer be written to {}: No space left on device (os error 28); the run continues",
        folder.display(),
    );
    let mut lines: Vec<_> = ended.err.lines().collect();
    lines.sort_unstable();
    assert_eq!(
        lines,
        [
            "[rank 0] err of 0",
            "[rank 1] err of 1",
            "[rank 2] err of 2",
            &full
        ]
    );
    let read = |name: &str| fs::read_to_string(folder.join(name)).unwrap();
    assert_eq!(read("rank-1.out"), "out\rof 1more\n");
    assert_eq!(read("rank-2.err"), "err of 2\n");
    fs::remove_dir_all(&folder).unwrap();
}
