//! Tests of worlds whose ranks are real processes. Each test runs itself again under `mpirun`.

use std::env;
use std::process::{Command, Output, Stdio};
use std::rc::Rc;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use burn_megatron_test_support::skipped;

use super::p2p::MpiP2p;
use super::{ENGINE, MpiTransport, library_version};
use crate::engines::p2p_collectives::tests::communicator::{CallTimeout, TestCommunicator};
use crate::engines::p2p_collectives::tests::programs;
use crate::engines::p2p_collectives::{
    P2pEvent, P2pTransport, ReceiveBuffer, ReceiveSlice, RequestId, SendSlice,
};
use crate::pool::PooledBuffer;
use crate::process::Transport;
use crate::{Buffer, CommError, Communicator, DType, ReduceOp};

/// An environment variable that is set in the processes that are ranks.
const RANK: &str = "BURN_MEGATRON_TEST_RANK";
const TIMEOUT: Duration = Duration::from_secs(60);

/// Returns whether this process is a rank. If not, runs the test again with `ranks` ranks and requires that it
/// succeeds.
fn is_rank(test: &str, ranks: usize) -> bool {
    if env::var_os(RANK).is_some() {
        return true;
    }
    if let Some(output) = launch(test, ranks, &[]) {
        assert!(output.status.success(), "{}", report(&output));
    }
    false
}

fn report(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    format!(
        "{}\n{}\n{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    )
}

/// Runs one test of this program with `ranks` ranks. Returns `None` if there is no `mpirun`.
fn launch(test: &str, ranks: usize, options: &[&str]) -> Option<Output> {
    let test = format!("engines::mpi::tests::{test}");
    let program = env::current_exe().expect("a running test has a path");
    let output = Command::new("mpirun")
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .env(RANK, "1")
        .args([
            "--oversubscribe",
            "--bind-to",
            "none",
            "-n",
            &ranks.to_string(),
        ])
        .args(options)
        .arg(program)
        .args(["--exact", &test, "--nocapture", "--test-threads=1"])
        .stdin(Stdio::null())
        .output();
    match output {
        Ok(output) => Some(output),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            skipped("there is no mpirun here; `apt-get install openmpi-bin` installs one");
            None
        }
        Err(error) => panic!("mpirun: {error}"),
    }
}

/// Creates the communicator of all ranks.
fn world(transport: &Arc<MpiTransport>, timeout: Duration) -> Arc<dyn Communicator> {
    let (rank, size) = (transport.rank(), transport.size());
    TestCommunicator::world(transport.clone(), rank, size, CallTimeout(timeout))
}

/// Runs `f` as one rank and then closes the world.
fn as_rank(f: impl FnOnce(&Arc<MpiTransport>, &Arc<dyn Communicator>)) {
    let transport = MpiTransport::open(Arc::default(), TIMEOUT).unwrap();
    f(&transport, &world(&transport, TIMEOUT));
    transport.close(TIMEOUT).unwrap();
}

#[test]
fn random_programs_agree_with_the_serial_model() {
    if !is_rank("random_programs_agree_with_the_serial_model", 4) {
        return;
    }
    as_rank(|transport, comm| {
        assert_eq!((transport.size(), comm.size()), (4, 4));
        for seed in 0..10 {
            programs::run(comm, seed, 30, 100_000).unwrap();
        }
    });
}

#[test]
fn long_messages_go_in_pieces() {
    if !is_rank("long_messages_go_in_pieces", 3) {
        return;
    }
    let open = || Ok((MpiP2p::open(1000)?, String::new()));
    let transport = MpiTransport::launch(ENGINE, Arc::default(), TIMEOUT, open).unwrap();
    let transport = Arc::new(transport);
    let comm = world(&transport, TIMEOUT);
    for seed in 0..5 {
        programs::run(&comm, seed, 20, 20_000).unwrap();
    }
    transport.close(TIMEOUT).unwrap();
}

#[test]
fn messages_of_a_megabyte_and_more_are_buffered() {
    if !is_rank("messages_of_a_megabyte_and_more_are_buffered", 2) {
        return;
    }
    as_rank(|transport, comm| {
        let (own, other) = (transport.rank(), 1 - transport.rank());
        let message = |from: usize, n: usize| Buffer::from(vec![(from * 10 + n) as f32; 300_000]);
        for n in 0..10 {
            comm.send(message(own, n), other).unwrap();
        }
        comm.barrier().unwrap();
        for n in 0..10 {
            let received = comm.receive(other, DType::F32, 300_000).unwrap();
            assert_eq!(received, message(other, n));
        }
    });
}

#[test]
fn rank_0_shares_bytes_before_the_first_call() {
    if !is_rank("rank_0_shares_bytes_before_the_first_call", 3) {
        return;
    }
    as_rank(|transport, comm| {
        let bytes = (transport.rank() == 0).then_some(&b"127.0.0.1:29500"[..]);
        assert_eq!(transport.share(bytes, TIMEOUT).unwrap(), b"127.0.0.1:29500");
        comm.barrier().unwrap();
    });
}

#[test]
fn ranks_that_disagree_get_the_mismatch_and_can_close() {
    if !is_rank("ranks_that_disagree_get_the_mismatch_and_can_close", 3) {
        return;
    }
    as_rank(|transport, comm| {
        let len = 100_000 + usize::from(transport.rank() == 1);
        let error = comm
            .all_reduce(vec![0f64; len].into(), ReduceOp::Sum)
            .unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, CommError::Mismatch { .. }), "{text}");
        assert!(
            text.contains("rank 1") && text.contains("of 100001 f64"),
            "{text}"
        );
        assert!(
            text.contains("of 100000 f64") && text.ends_with("the lengths differ"),
            "{text}"
        );
    });
}

#[test]
fn missing_ranks_are_named_in_calls_and_at_the_close() {
    if !is_rank("missing_ranks_are_named_in_calls_and_at_the_close", 3) {
        return;
    }
    let short = Duration::from_millis(300);
    let transport = MpiTransport::open(Arc::default(), TIMEOUT).unwrap();
    let late = transport.rank() == 2;
    thread::sleep(if late { 10 * short } else { Duration::ZERO });
    let comm = world(&transport, if late { TIMEOUT } else { short });
    let result = comm.all_gather(vec![0f32; 5000].into());
    if late {
        assert_eq!(result, Ok(vec![0f32; 15_000].into()));
    } else {
        // On a busy machine, rank 0 or 1 may be late too.
        let error = result.unwrap_err().to_string();
        assert!(error.contains("2 ha"), "{error}");
        let wanted = " not joined call 0 all_gather of 5000 f32 over world [0, 1, 2]";
        assert!(error.contains(wanted), "{error}");
        let error = transport.close(short).unwrap_err().to_string();
        let wanted = "mpi: the world is not closed after 0.3 s: rank";
        assert!(error.starts_with(wanted), "{error}");
        assert!(
            error.contains("2 ha") && error.ends_with(" not closed the world"),
            "{error}"
        );
    }
    transport.close(TIMEOUT).unwrap();
}

#[test]
fn a_start_without_all_ranks_times_out() {
    let test = "a_start_without_all_ranks_times_out";
    if env::var_os(RANK).is_none() {
        // The ranks exit without MPI_Finalize, which mpirun reports as a failure.
        if let Some(output) = launch(test, 2, &[]) {
            assert!(
                report(&output).contains("rank 0 got the error"),
                "{}",
                report(&output)
            );
        }
        return;
    }
    if env::var("OMPI_COMM_WORLD_RANK").unwrap() == "1" {
        return thread::sleep(Duration::from_secs(4));
    }
    let error = MpiTransport::open(Arc::default(), Duration::from_secs(1)).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("mpi: not started after 1.0 s"),
        "{error}"
    );
    println!("rank 0 got the error");
}

#[test]
fn a_killed_rank_ends_the_job() {
    let test = "a_killed_rank_ends_the_job";
    if env::var_os(RANK).is_none() {
        if let Some(output) = launch(test, 3, &[]) {
            assert!(report(&output).contains("signal 9"), "{}", report(&output));
            assert!(!output.status.success());
        }
        return;
    }
    as_rank(|transport, comm| {
        comm.barrier().unwrap();
        if transport.rank() == 1 {
            let own = std::process::id().to_string();
            Command::new("kill").args(["-9", &own]).status().unwrap();
        }
        let result = comm.all_reduce(vec![0f32; 100_000].into(), ReduceOp::Sum);
        unreachable!("mpirun ends the others before {result:?}");
    });
}

#[test]
fn an_aborted_world_ends_without_mpi() {
    let test = "an_aborted_world_ends_without_mpi";
    if env::var_os(RANK).is_none() {
        if let Some(output) = launch(test, 2, &[]) {
            assert!(
                report(&output).contains("rank 0 has aborted"),
                "{}",
                report(&output)
            );
        }
        return;
    }
    let transport = MpiTransport::open(Arc::default(), TIMEOUT).unwrap();
    let comm = world(&transport, Duration::from_millis(300));
    if transport.rank() == 1 {
        return thread::sleep(Duration::from_secs(3));
    }
    let pending = comm.start_all_gather(vec![1f32; 1 << 20].into()).unwrap();
    transport.abort();
    assert!(matches!(pending.wait(), Err(CommError::Deadline { .. })));
    assert!(transport.close(TIMEOUT).is_err());
    println!("rank 0 has aborted");
}

/// Creates memory to send from or receive into.
fn memory(len: usize) -> (Option<SendSlice>, Option<ReceiveSlice>) {
    let lent = || PooledBuffer::new(vec![0u8; len].into(), &Arc::default());
    let (_, place) = ReceiveBuffer::single(lent(), 0..len);
    (SendSlice::new(&Rc::new(lent()), 0..len), place)
}

fn poll_until(
    transport: &mut MpiP2p,
    done: impl Fn(&MpiP2p, &[P2pEvent]) -> bool,
) -> Result<(), CommError> {
    let (began, mut events) = (Instant::now(), Vec::new());
    while !done(transport, &events) {
        transport.poll(&mut events)?;
        assert!(began.elapsed() < TIMEOUT);
    }
    Ok(())
}

#[test]
fn errors_of_mpi_come_back() {
    if !is_rank("errors_of_mpi_come_back", 2) {
        return;
    }
    let mut transport = MpiP2p::open(1 << 20).unwrap();
    let again = MpiP2p::open(1 << 20).err().unwrap().to_string();
    assert!(
        again.starts_with("mpi: MPI was already started in this process"),
        "{again}"
    );
    let error = transport.send_control(99, vec![0]).unwrap_err().to_string();
    assert_eq!(
        error,
        "mpi: MPI_Isend with rank 99: MPI_ERR_RANK: invalid rank"
    );
    if transport.rank() == 0 {
        transport
            .send(1, 5, memory(9000).0.unwrap(), RequestId(1))
            .unwrap();
        poll_until(&mut transport, |transport, _| transport.is_idle()).unwrap();
    } else {
        transport
            .receive(0, 5, memory(8999).1.unwrap(), RequestId(1))
            .unwrap();
        let error = poll_until(&mut transport, |_, events| !events.is_empty()).unwrap_err();
        let wanted = "mpi: MPI_Irecv with rank 0: MPI_ERR_TRUNCATE: message truncated";
        assert_eq!(error.to_string(), wanted);
    }
    transport.finish().unwrap();
}

#[test]
fn the_version_of_the_library_needs_no_start() {
    let version = library_version();
    assert!(
        version.contains("MPI") && !version.contains(['\n', '\0']),
        "{version}"
    );
}
