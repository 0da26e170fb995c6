//! Tests the start of ranks: their environment, and invalid launches.

use std::fs;
use std::io::Write;
use std::net::TcpListener;
use std::process::Command;

use burn_megatron_test_support::skipped;

use super::run::{NO_MPIRUN, Way, both_ways, has_mpirun, launch, launch_with};

#[test]
fn each_rank_has_its_environment() {
    // A temporary file is readable by its owner only, as required for a token.
    let mut token = tempfile::NamedTempFile::new().unwrap();
    writeln!(token, "{}", "ab".repeat(32)).unwrap();
    let port = free_port();
    let flags = [
        "--master-port",
        &port.to_string(),
        "--token-file",
        &token.path().display().to_string(),
    ];
    let script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT \
                  ${BURN_MEGATRON_RENDEZVOUS:-none} ${BURN_MEGATRON_LAUNCH_LINK:-none} \
                  $(echo $BURN_MEGATRON_TOKEN | cut -c 1-4)";
    let ended = launch(Way::Own, 2, &flags, script).end();
    ended.code(0);
    assert_eq!(
        ended.sorted(),
        [
            format!("[rank 0] 0/2 0/2 127.0.0.1:{port} 127.0.0.1:{port} none abab"),
            format!("[rank 1] 1/2 1/2 127.0.0.1:{port} 127.0.0.1:{port} none abab"),
        ]
    );
    // Without --master-port, a free port is used.
    let ended = launch(
        Way::Own,
        1,
        &[],
        "echo $RANK/$WORLD_SIZE $MASTER_ADDR:$MASTER_PORT",
    )
    .end();
    let port: u16 = ended
        .out()
        .trim_end()
        .strip_prefix("[rank 0] 0/1 127.0.0.1:")
        .unwrap()
        .parse()
        .unwrap();
    assert!(port > 1000);
}

/// Returns a port that is currently free.
fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

#[test]
fn each_run_has_a_token_of_its_own_that_no_list_of_processes_shows() {
    both_ways(|way| {
        let tokens = [(); 2].map(|()| {
            let run = launch(way, 2, &[], "echo $BURN_MEGATRON_TOKEN; exec sleep 1");
            run.await_processes("sleep 1", 2);
            let calls: Vec<String> = run.processes().into_iter().map(|(_, call)| call).collect();
            let ended = run.end();
            ended.code(0);
            let lines = ended.sorted();
            let tokens: Vec<_> = lines.iter().filter_map(|line| line.get(9..)).collect();
            assert_eq!((tokens.len(), tokens[0].len()), (2, 64), "{lines:?}");
            assert_eq!(tokens[0], tokens[1]);
            assert!(
                !calls.iter().any(|call| call.contains(tokens[0])),
                "{calls:?}"
            );
            assert!(!ended.err.contains(tokens[0]));
            tokens[0].to_owned()
        });
        assert_ne!(tokens[0], tokens[1]);
    });
}

#[test]
fn each_rank_of_mpirun_has_its_environment() {
    if !has_mpirun() {
        return skipped(NO_MPIRUN);
    }
    let script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $OMPI_COMM_WORLD_RANK $A_NAME ${BURN_MEGATRON_LAUNCH_LINK:-none}";
    let ended = launch(
        Way::Mpirun,
        2,
        &["--mpirun-args", "-x 'A_NAME=a value'"],
        script,
    )
    .end();
    ended.code(0);
    assert_eq!(
        ended.sorted(),
        [
            "[rank 0] 0/2 0/2 0 a value none",
            "[rank 1] 1/2 1/2 1 a value none"
        ]
    );
}

#[test]
fn a_rank_runs_a_command_of_this_program() {
    both_ways(|way| {
        let words = ["--ranks", "2", "--engine", way.engine(), "--", "--version"];
        let ended = launch_with(|_| {}, &words).end();
        ended.code(0);
        let version = concat!("burn-megatron ", env!("CARGO_PKG_VERSION"));
        assert_eq!(
            ended.sorted(),
            [format!("[rank 0] {version}"), format!("[rank 1] {version}")]
        );
    });
}

#[test]
fn what_cannot_be_started_is_named() {
    let start = |words: &[&str]| {
        let ended = launch_with(|_| {}, words).end();
        (ended.status.code().unwrap(), ended.err)
    };
    let gone = [
        "--ranks",
        "2",
        "--engine",
        "nccl",
        "--program",
        "/no/such/thing",
    ];
    let error = "error: the program /no/such/thing cannot be started: there is no such file\n";
    assert_eq!(start(&gone), (127, error.to_owned()));
    let text = std::env::temp_dir().join(format!("launch-{}", std::process::id()));
    fs::write(&text, "#!/no/such/interpreter\n").unwrap();
    Command::new("chmod").arg("+x").arg(&text).status().unwrap();
    let (code, error) = start(&[
        "--ranks",
        "1",
        "--engine",
        "nccl",
        "--program",
        text.to_str().unwrap(),
    ]);
    let expected = format!(
        "rank 0 could not be started: {}: No such file or directory (os error 2)\n",
        text.display()
    );
    assert_eq!((code, error), (127, expected));
    fs::remove_file(text).unwrap();
    let ended = launch_with(
        |command| {
            command.env("PATH", "/nowhere");
        },
        &["--ranks", "2", "--", "pretrain"],
    )
    .end();
    ended.code(127);
    assert!(
        ended
            .err
            .starts_with("error: mpirun was not found on PATH; install it"),
        "{}",
        ended.err
    );
    if cfg!(not(feature = "cuda")) {
        let (code, error) = start(&["--ranks", "2", "--engine", "nccl", "--", "pretrain"]);
        let start = "error: the engine nccl is not compiled in: install this program with it, `cargo install --path \
                     cli --features cuda`";
        assert!(code == 2 && error.starts_with(start), "{code}: {error}");
        // The error is printed once, not for each rank.
        assert_eq!(error.lines().count(), 1, "{error}");
    }
    let (code, error) = start(&["--ranks", "2", "--mpirun", "/bin/echo", "--", "pretrain"]);
    assert_eq!(code, 127);
    assert!(
        error.starts_with("error: /bin/echo is not Open MPI's mpirun: "),
        "{error}"
    );
}

#[test]
fn wrong_usage_has_its_own_code() {
    let ended = |words: &[&str]| launch_with(|_| {}, words).end();
    let nothing = ended(&["--ranks", "2"]);
    nothing.code(2);
    assert!(nothing.err.contains("<COMMAND>"), "{}", nothing.err);
    ended(&["--ranks", "0", "--", "pretrain"]).code(2);
    ended(&["--ranks", "2", "--engine", "threads", "--", "pretrain"]).code(2);
    let nested = launch_with(
        |command| {
            command.env("RANK", "3");
        },
        &["--ranks", "2", "--", "pretrain"],
    )
    .end();
    nested.code(2);
    assert!(
        nested.err.starts_with("error: RANK=3 is set: "),
        "{}",
        nested.err
    );
}

/// Checks that messages of mpirun itself are printed.
#[test]
fn mpirun_explains_what_it_cannot_do() {
    if !has_mpirun() {
        return skipped(NO_MPIRUN);
    }
    let ended = launch(Way::Mpirun, 2, &["--mpirun-args", "--no-such-flag"], "true").end();
    ended.code(1);
    assert!(
        ended
            .err
            .contains("mpirun: Error: unknown option \"--no-such-flag\""),
        "{}",
        ended.err
    );
    ended.summary(&["mpirun ended with exit code 1 before its ranks did"]);
}
