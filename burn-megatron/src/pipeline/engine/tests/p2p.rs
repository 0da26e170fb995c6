//! Tests of messages, their shapes, and receives that are posted ahead.

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::comm::{Buffer, BufferPool, Call, Communicator, Group, Pending};
use crate::pipeline::engine::p2p::fp8;
use crate::pipeline::engine::p2p::shapes::TensorSpec;

/// An operation that a rank started or waited for, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// A tensor or numbers to a rank.
    Send(usize, crate::comm::DType, usize),
    /// The start of a receive from a rank, and its wait.
    Post(usize),
    Wait(usize),
}

/// A communicator that records the messages of a rank.
#[derive(Debug)]
struct Watched {
    inner: Comm,
    steps: Arc<Mutex<Vec<Step>>>,
}

impl Watched {
    fn note(&self, step: Step) {
        self.steps.lock().unwrap().push(step);
    }
}

impl Communicator for Watched {
    fn group(&self) -> &Group {
        self.inner.group()
    }

    fn start(&self, call: Call, input: Buffer) -> Result<Pending, CommError> {
        match call {
            Call::Send { to } => self.note(Step::Send(to, input.dtype(), input.len())),
            Call::Receive { from, .. } => {
                self.note(Step::Post(from));
                let pending = self.inner.start(call, input)?;
                let steps = self.steps.clone();
                return Ok(Pending::new(move || {
                    steps.lock().unwrap().push(Step::Wait(from));
                    pending.wait()
                }));
            }
            _ => {}
        }
        self.inner.start(call, input)
    }

    fn split(&self, name: &str, groups: &[Vec<usize>]) -> Result<Comm, CommError> {
        self.inner.split(name, groups)
    }

    fn pool(&self) -> Option<&Arc<BufferPool>> {
        self.inner.pool()
    }
}

fn ahead(receives_ahead: usize) -> P2pConfig {
    P2pConfig {
        receives_ahead,
        fp8: false,
    }
}

/// Returns the steps of every rank in several runs of one engine, and the gradients by stage after all runs.
/// `runs` contains the inputs of each run.
fn watched(
    schedule: &Schedule,
    runs: &[Vec<[usize; 2]>],
    config: P2pConfig,
) -> (Vec<Vec<Vec<Step>>>, Vec<Vec<f64>>) {
    let ranks = World::threads(schedule.ranks()).unwrap().run(|rank| {
        let steps = Arc::<Mutex<Vec<Step>>>::default();
        let comm: Comm = Arc::new(Watched {
            inner: rank.communicator(),
            steps: steps.clone(),
        });
        let mut chain = Chain::new(schedule, rank.rank(), &runs[0]);
        let sums = chain.sums.clone();
        let engine = Engine::new(schedule, &comm, &Device::flex(), sums.clone())?;
        let engine = engine.with_p2p(config);
        let mut of_runs = vec![];
        for inputs in runs {
            chain.inputs.clone_from(inputs);
            engine.run(&chain)?;
            of_runs.push(std::mem::take(&mut *steps.lock().unwrap()));
        }
        Ok::<_, RankError>((of_runs, chain.gradients()))
    });
    let (steps, gradients) = ranks.unwrap().into_iter().unzip();
    (steps, by_stage(gradients))
}

/// Returns the number of messages of all ranks in a run: tensor messages and number messages.
fn messages(ranks: &[Vec<Vec<Step>>], run: usize) -> [usize; 2] {
    let steps = ranks.iter().flat_map(|rank| &rank[run]);
    let mut counts = [0; 2];
    for step in steps {
        if let Step::Send(_, dtype, _) = step {
            counts[usize::from(*dtype == crate::comm::DType::I64)] += 1;
        }
    }
    counts
}

fn sends(schedule: &Schedule) -> usize {
    let actions = (0..schedule.ranks()).flat_map(|rank| schedule.actions(rank));
    actions.filter(|action| action.kind.is_send()).count()
}

/// Returns the sending and receiving rank of each activation between two ranks.
fn ways(schedule: &Schedule) -> Vec<(usize, usize)> {
    let rank_of = |stage| schedule.rank_of(stage);
    let ways = (1..schedule.stages()).map(|stage| (rank_of(stage - 1), rank_of(stage)));
    ways.filter(|(from, to)| from != to).collect()
}

/// Returns the pairs of ranks that pass activations.
fn pairs(schedule: &Schedule) -> BTreeSet<(usize, usize)> {
    ways(schedule).into_iter().collect()
}

#[test]
fn a_tensor_is_one_message_and_shapes_are_sent_once() {
    for kind in ScheduleKind::ALL {
        let schedule = schedule(kind, 4, 8);
        let (ways, pairs) = (ways(&schedule).len(), pairs(&schedule).len());
        let (ranks, _) = watched(&schedule, &[even(8), even(8)], ahead(1));
        let sends = sends(&schedule);
        assert_eq!(messages(&ranks, 0), [sends, ways + pairs], "{kind}");
        assert_eq!(messages(&ranks, 1), [sends, pairs], "{kind}");
    }
}

#[test]
fn the_shape_of_a_new_key_is_sent() {
    let first: Vec<_> = (0..8).map(|i| [1 + i % 2, 4]).collect();
    let permuted: Vec<_> = first.iter().rev().copied().collect();
    let mut longer = permuted.clone();
    longer[3] = [3, 1];
    let runs = [first, permuted, longer];
    for kind in ScheduleKind::ALL {
        let schedule = schedule(kind, 2, 8);
        let (ways, pairs) = (ways(&schedule).len(), pairs(&schedule).len());
        let (ranks, found) = watched(&schedule, &runs, ahead(2));
        let numbers: Vec<_> = (0..3).map(|run| messages(&ranks, run)[1]).collect();
        assert_eq!(numbers, [pairs + 2 * ways, pairs, pairs + ways], "{kind}");
        let (_, expected) = watched(&schedule, &runs, ahead(0));
        assert_eq!(found, expected, "{kind}");
    }
}

#[test]
fn receives_ahead_change_no_bit() {
    let inputs: Vec<_> = (0..8).map(|i| [1 + i % 2, 1 + (i * 3) % 5]).collect();
    for kind in ScheduleKind::ALL {
        for ranks in [2, 4] {
            let schedule = schedule(kind, ranks, inputs.len());
            let gradients = |n| watched(&schedule, &[inputs.clone(), even(8)], ahead(n)).1;
            let expected = gradients(0);
            for n in [1, 3, usize::MAX] {
                assert_eq!(gradients(n), expected, "{kind}, {ranks} ranks, {n} ahead");
            }
        }
    }
}

/// Returns the steps of a rank in a run in which all shapes are known. Receives ahead come first, and the
/// others are at their positions in the list. Waits are directly before the use of a tensor.
fn expected_steps(schedule: &Schedule, rank: usize, ahead: usize) -> Vec<Step> {
    let list = schedule.actions(rank);
    let mut unposted = BTreeMap::new();
    for receive in list.iter().filter(|action| action.kind.is_receive()) {
        *unposted.entry(schedule.peer(receive).unwrap()).or_insert(0) += 1;
    }
    let mut steps = vec![];
    for (from, unposted) in &mut unposted {
        let first = ahead.min(*unposted);
        *unposted -= first;
        steps.extend(vec![Step::Post(*from); first]);
    }
    for action in list {
        match schedule.peer(action) {
            Some(to) if action.kind.is_send() => {
                steps.push(Step::Send(to, crate::comm::DType::F64, 2 * 4 * WIDTH));
            }
            Some(from) if unposted[&from] > 0 => {
                *unposted.get_mut(&from).unwrap() -= 1;
                steps.push(Step::Post(from));
            }
            _ => {
                let receive = schedule.receive_before(action);
                let from = receive.and_then(|receive| schedule.peer(&receive));
                steps.extend(from.map(Step::Wait));
            }
        }
    }
    steps
}

/// Checks the second run, without the messages that compare the shape keys. No send waits for an earlier
/// receive.
#[test]
fn receives_are_posted_ahead_and_waited_for_before_their_use() {
    for kind in ScheduleKind::ALL {
        let schedule = schedule(kind, 4, 8);
        let keys = comparisons(&schedule);
        for ahead_of_position in [0, 1, 3, usize::MAX] {
            let (ranks, _) = watched(&schedule, &[even(8), even(8)], ahead(ahead_of_position));
            for (rank, steps) in ranks.iter().enumerate() {
                assert_eq!(
                    steps[1][keys[rank]..],
                    expected_steps(&schedule, rank, ahead_of_position),
                    "{kind}, rank {rank}, {ahead_of_position} ahead"
                );
            }
        }
    }
}

/// Returns the number of steps of each rank that compare shape keys: per pair of ranks, a receive and its wait,
/// or a send.
fn comparisons(schedule: &Schedule) -> Vec<usize> {
    let pairs = pairs(schedule);
    let of_rank = |rank| {
        let steps = pairs
            .iter()
            .map(|(from, to)| usize::from(*from == rank) + 2 * usize::from(*to == rank));
        steps.sum()
    };
    (0..schedule.ranks()).map(of_rank).collect()
}

/// A chain whose first stage returns shapes that its neighbor does not expect.
struct Misshapen {
    chain: Chain,
    /// The micro-batch with another shape, and the key that this rank reports for it.
    at: usize,
    says: Option<[usize; 2]>,
}

impl Stage for Misshapen {
    fn shape_key(&self, micro_batch: usize) -> ShapeKey {
        match self.says {
            Some(key) if micro_batch == self.at => key,
            _ => [2, 4],
        }
    }

    fn forward(&self, stage: usize, micro_batch: usize, given: Option<Tensor<3>>) -> StageOutput {
        self.chain.forward(stage, micro_batch, given)
    }
}

/// Returns the error of two ranks if rank 0 has another shape in micro-batch 3.
fn misshapen(says: Option<[usize; 2]>, runs: usize) -> String {
    let schedule = schedule(ScheduleKind::OneFOneB, 2, 4);
    let result = World::threads(2).unwrap().run(|rank| {
        let comm = rank.communicator();
        let own_rank = comm.rank();
        let mut model = Misshapen {
            chain: Chain::new(&schedule, own_rank, &even(4)),
            at: 3,
            says: None,
        };
        let sums = model.chain.sums.clone();
        let engine = Engine::new(&schedule, &comm, &Device::flex(), sums.clone())?;
        for run in 0..runs {
            if run + 1 == runs && own_rank == 0 {
                model.chain.inputs[3] = [4, 2];
                model.says = says;
            }
            engine.run(&model)?;
        }
        Ok::<_, RankError>(())
    });
    result.unwrap_err().to_string()
}

#[test]
fn an_unexpected_shape_names_rank_stage_micro_batch_and_both_shapes() {
    for runs in [1, 2] {
        let message = misshapen(None, runs);
        for part in [
            "pipeline rank 0, sending the activation of stage 0, micro-batch 3: mismatch",
            "rank 0 is in the activation of stage 0, micro-batch 3: [4, 2, 3] of f64",
            "rank 1 in the activation of stage 0, micro-batch 3: [2, 4, 3] of f64",
            "micro-batches with the shape key [2, 4] have one shape",
        ] {
            assert!(message.contains(part), "{part}: {message}");
        }
    }
}

/// The number of elements is equal, so that only the comparison of the keys detects the difference, in the
/// first run or later.
#[test]
fn ranks_with_other_shape_keys_are_named() {
    for runs in [1, 2] {
        let message = misshapen(Some([4, 2]), runs);
        for part in [
            "pipeline rank 1, before the first action: mismatch",
            "rank 0 is in the activation of stage 0, micro-batch 3 with the shape key [4, 2]",
            "rank 1 in the activation of stage 0, micro-batch 3 with the shape key [2, 4]",
            "the shape keys of the micro-batches differ",
        ] {
            assert!(message.contains(part), "{part}: {message}");
        }
    }
}

/// Checks the elements `x` and `y` of a row of one block.
fn within_the_bound(x: &[f64], y: &[f64]) {
    let largest = x.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    for (x, y) in x.iter().zip(y) {
        // The scale is rounded to f32, so that the largest code may be slightly exceeded.
        let bound = (x.abs() / 16.0).max(largest * 2f64.powf(-18.8)) * (1.0 + 1e-5);
        assert!((x - y).abs() <= bound, "{x} became {y}, largest {largest}");
    }
}

#[test]
fn a_tensor_in_8_bits_is_within_the_bound() {
    for hidden in [1, 7, 128, 129, 300] {
        let shape = [2, 3, hidden];
        let x = numbers(5, shape, &Device::flex());
        // Rows of different magnitudes, with small values in each.
        let scale = numbers(9, [2, 3, 1], &Device::flex()).mul_scalar(8.0).exp();
        let x = x.clone().powi_scalar(9) * scale;
        let message = fp8::encode(x.clone());
        // One byte per element in rows of a multiple of 16, and one scale per block.
        let bytes = 6 * (hidden.next_multiple_of(16) + 4 * hidden.div_ceil(128));
        assert_eq!(4 * fp8::words(shape), bytes);
        assert_eq!(message.dims(), [fp8::words(shape)]);
        let received = fp8::decode(
            message,
            TensorSpec {
                shape,
                dtype: DType::F64,
            },
        );
        assert_eq!((received.dims(), received.dtype()), (shape, DType::F64));
        let (x, y) = (values(x), values(received));
        for (x, y) in x.chunks(hidden).zip(y.chunks(hidden)) {
            for (x, y) in x.chunks(128).zip(y.chunks(128)) {
                within_the_bound(x, y);
            }
        }
    }
}

/// The gradients of a chain of two stages equal the gradients of a chain that rounds between them. The size of
/// a message is the size of the codes and scales.
#[test]
fn activations_and_gradients_are_sent_in_8_bits() {
    let schedule = schedule(ScheduleKind::OneFOneB, 2, 4);
    let config = P2pConfig {
        fp8: true,
        ..ahead(1)
    };
    let (ranks, found) = watched(&schedule, &[even(4)], config);
    let words = fp8::words([2, 4, WIDTH]);
    for step in ranks.iter().flat_map(|rank| &rank[0]) {
        if let Step::Send(_, dtype, len) = step
            && *dtype != crate::comm::DType::I64
        {
            assert_eq!((*dtype, *len), (crate::comm::DType::I32, words));
        }
    }
    let received = |x: Tensor<3>| fp8::decode(fp8::encode(x.clone()), TensorSpec::of(&x));
    let [first, second] = [0, 1].map(|stage| weight(stage, &Device::flex()));
    let mut expected =
        [0, 1].map(|_| Tensor::<2>::zeros([WIDTH, WIDTH], (&Device::flex(), DType::F64)));
    for micro_batch in 0..4 {
        let flat = |x: Tensor<3>| x.reshape([8, WIDTH]);
        let batched = |x: Tensor<2>| x.reshape([2, 4, WIDTH]);
        let x = flat(input(micro_batch, [2, 4]));
        let y = flat(received(batched(x.clone().matmul(first.clone()))));
        let dz = y.clone().matmul(second.clone()).mul_scalar(2.0);
        expected[1] = expected[1].clone() + y.transpose().matmul(dz.clone());
        let dy = received(batched(dz.matmul(second.clone().transpose())));
        expected[0] = expected[0].clone() + x.transpose().matmul(flat(dy));
    }
    for (found, expected) in found.iter().zip(expected.map(values)) {
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-12, "{found} {expected}");
        }
    }
    let (_, exact) = watched(&schedule, &[even(4)], ahead(1));
    assert_ne!(found, exact);
}
