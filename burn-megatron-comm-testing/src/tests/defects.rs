//! Engines with one defect each. The conformance suite must detect each defect in the test case that tests for it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::*;
use burn_megatron_comm::{Buffer, BufferPool, Call, DType, Group, Pending, ReduceOp};
use half::bf16;

/// The defect of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Defect {
    None,
    /// Sums of f32 are computed from left to right.
    Order,
    /// The first and the last chunk of an all_gather are swapped.
    SwappedChunks,
    /// A broadcast loses its last element.
    DroppedElement,
    /// A reduce_scatter returns the chunk of the neighbor.
    Neighbour,
    /// An all_to_all is shifted by one element.
    Shifted,
    /// An all_to_all uses the counts of the most recently started all_to_all.
    SharedCounts,
    /// Averages are not divided by the number of ranks.
    NotDivided,
    /// Sums of bf16 are rounded at each rank.
    SixteenBits,
    /// A maximum ignores NaN.
    NanLost,
    /// Sums of i64 saturate.
    Saturates,
    /// The last element of a long buffer is lost.
    LongTail,
    /// Receives get their messages in the order of the waits.
    LateReceives,
    /// A message whose handle is dropped is sent twice.
    RepeatedSends,
    /// Collectives run in the order of the waits.
    LateCollectives,
    /// A broadcast whose handle is dropped runs twice.
    NoticedDrop,
    /// The handles of calls that were started together are reversed.
    ReversedHandles,
    /// Subgroups report the right group, but call the whole group.
    WrongGroup,
    /// All subgroups share the messages of the whole group.
    MixedMessages,
    /// A barrier does not wait.
    OpenBarrier,
    /// The pool keeps no buffers.
    ForgetfulPool,
    /// Invalid calls are accepted.
    Accepts,
    /// The result is wrong for a length that only random programs use.
    Rare,
}

const DEFECTS: [(Defect, &str); 22] = [
    (Defect::Order, "order of sums"),
    (Defect::SwappedChunks, "all_gather"),
    (Defect::DroppedElement, "broadcast"),
    (Defect::Neighbour, "reduce_scatter"),
    (Defect::Shifted, "all_to_all"),
    (Defect::SharedCounts, "changing all_to_all"),
    (Defect::NotDivided, "averages"),
    (Defect::SixteenBits, "16-bit sums in f32"),
    (Defect::NanLost, "nan"),
    (Defect::Saturates, "integers wrap"),
    (Defect::LongTail, "long buffers"),
    (Defect::LateReceives, "messages in order"),
    (Defect::RepeatedSends, "dropped messages"),
    (Defect::LateCollectives, "handles in any order"),
    (Defect::NoticedDrop, "dropped handles"),
    (Defect::ReversedHandles, "calls started as one"),
    (Defect::WrongGroup, "splits"),
    (Defect::MixedMessages, "messages of several groups"),
    (Defect::OpenBarrier, "barrier"),
    (Defect::ForgetfulPool, "pool"),
    (Defect::Accepts, "calls that do not fit"),
    (Defect::Rare, "random programs"),
];

/// A communicator with a defect.
#[derive(Debug)]
struct Defective {
    inner: Arc<dyn Communicator>,
    /// The group that the communicator reports.
    group: Group,
    whole: Arc<dyn Communicator>,
    pool: Arc<BufferPool>,
    /// The number of elements that the last all_to_all receives.
    received: Arc<AtomicUsize>,
    defect: Defect,
}

impl Defective {
    fn over(inner: Arc<dyn Communicator>, defect: Defect) -> Arc<dyn Communicator> {
        Arc::new(Self {
            group: inner.group().clone(),
            whole: Arc::clone(&inner),
            inner,
            pool: Arc::default(),
            received: Arc::default(),
            defect,
        })
    }

    /// Runs an all_reduce that combines all contributions from left to right.
    fn folded<T: burn_megatron_comm::Element>(
        &self,
        input: Buffer,
        combine: impl Fn(T, T) -> T + Send + 'static,
    ) -> Result<Pending, CommError>
    where
        Buffer: From<Vec<T>>,
    {
        let (len, ranks) = (input.len(), self.size());
        let all = self.inner.start_all_gather(input)?;
        Ok(Pending::new(move || {
            let all = all.wait()?;
            let all = all.as_slice::<T>().unwrap();
            let column = |at: usize| (0..ranks).map(move |rank| all[rank * len + at]);
            let sum = |at: usize| column(at).reduce(&combine).unwrap();
            Ok((0..len).map(sum).collect::<Vec<_>>().into())
        }))
    }

    /// Returns the index in the whole group of the member with index `index` in the subgroup.
    fn in_whole(&self, index: usize) -> usize {
        let rank = self.group.ranks()[index];
        let mut ranks = self.whole.group().ranks().iter();
        ranks.position(|member| *member == rank).unwrap()
    }
}

/// Creates a handle that applies `change` to the result.
fn then(
    pending: Result<Pending, CommError>,
    change: impl FnOnce(Buffer) -> Buffer + Send + 'static,
) -> Result<Pending, CommError> {
    let pending = pending?;
    Ok(Pending::new(move || pending.wait().map(change)))
}

fn without_last(buffer: Buffer) -> Buffer {
    buffer.slice(0..buffer.len().saturating_sub(1))
}

/// Returns the buffer, rotated to the left by `at` elements.
fn rotated(buffer: Buffer, at: usize) -> Buffer {
    let (start, end) = (buffer.slice(0..at), buffer.slice(at..buffer.len()));
    Buffer::concat(&[end, start]).unwrap()
}

/// A value that repeats a call when it is dropped.
struct Again(Option<(Arc<dyn Communicator>, Call, Buffer)>);

impl Again {
    fn disarm(&mut self) {
        self.0 = None;
    }
}

impl Drop for Again {
    fn drop(&mut self) {
        if let Some((comm, call, input)) = self.0.take() {
            drop(comm.start(call, input));
        }
    }
}

impl Communicator for Defective {
    fn group(&self) -> &Group {
        &self.group
    }

    fn start(&self, call: Call, input: Buffer) -> Result<Pending, CommError> {
        let (size, index, len, dtype) = (self.size(), self.rank(), input.len(), input.dtype());
        let inner = Arc::clone(&self.inner);
        match (self.defect, &call) {
            (Defect::Order, Call::AllReduce(ReduceOp::Sum)) if dtype == DType::F32 => {
                self.folded(input, |a: f32, b: f32| a + b)
            }
            (Defect::SixteenBits, Call::AllReduce(ReduceOp::Sum)) if dtype == DType::BF16 => {
                self.folded(input, |a: bf16, b: bf16| a + b)
            }
            (Defect::Saturates, Call::AllReduce(ReduceOp::Sum)) if dtype == DType::I64 => {
                self.folded(input, i64::saturating_add)
            }
            (Defect::NanLost, Call::AllReduce(ReduceOp::Max)) if dtype == DType::F64 => {
                self.folded(input, f64::max)
            }
            (Defect::SwappedChunks, Call::AllGather) => {
                then(inner.start(call, input), move |all| rotated(all, len))
            }
            (Defect::DroppedElement, Call::Broadcast { .. }) => {
                then(inner.start(call, input), without_last)
            }
            (Defect::LongTail, Call::AllReduce(_)) if len > 2000 => {
                let zero = Buffer::zeros(dtype, 1);
                then(inner.start(call, input), move |sum| {
                    Buffer::concat(&[without_last(sum), zero]).unwrap()
                })
            }
            (Defect::Neighbour, Call::ReduceScatter(op)) => {
                let (chunk, next) = (len / size, (index + 1) % size);
                then(inner.start_all_reduce(input, *op), move |all| {
                    all.slice(next * chunk..(next + 1) * chunk)
                })
            }
            (Defect::Shifted, Call::AllToAll { .. }) => {
                then(inner.start(call, input), |all| match all.len() {
                    0 => all,
                    _ => rotated(all, 1),
                })
            }
            (Defect::SharedCounts, Call::AllToAll { receive, .. }) => {
                let received = Arc::clone(&self.received);
                received.store(receive.iter().sum(), Ordering::Relaxed);
                then(inner.start(call, input), move |all| {
                    all.slice(0..all.len().min(received.load(Ordering::Relaxed)))
                })
            }
            (Defect::NotDivided, Call::AllReduce(ReduceOp::Average)) => {
                inner.start_all_reduce(input, ReduceOp::Sum)
            }
            (Defect::LateReceives, Call::Receive { .. })
            | (Defect::LateCollectives, Call::AllReduce(_) | Call::AllGather) => {
                Ok(Pending::new(move || inner.start(call, input)?.wait()))
            }
            (Defect::NoticedDrop, Call::Broadcast { .. })
            | (Defect::RepeatedSends, Call::Send { .. }) => {
                let pending = inner.start(call.clone(), input.clone())?;
                let mut again = Again(Some((inner, call, input)));
                Ok(Pending::new(move || {
                    again.disarm();
                    pending.wait()
                }))
            }
            (Defect::MixedMessages, Call::Send { to }) => {
                self.whole.start_send(input, self.in_whole(*to))
            }
            (Defect::MixedMessages, Call::Receive { from, dtype, len }) => {
                self.whole.start_receive(self.in_whole(*from), *dtype, *len)
            }
            (Defect::OpenBarrier, Call::Barrier) => Ok(Pending::ready(input)),
            (Defect::ForgetfulPool, _) => {
                self.pool.trim();
                inner.start(call, input)
            }
            (Defect::Accepts, Call::AllReduce(ReduceOp::Average)) if !dtype.is_float() => {
                inner.start_all_reduce(input, ReduceOp::Sum)
            }
            (Defect::Rare, Call::AllGather) if len == 300 => {
                then(inner.start(call, input), |all| rotated(all, 1))
            }
            _ => inner.start(call, input),
        }
    }

    fn split(&self, name: &str, groups: &[Vec<usize>]) -> Result<Arc<dyn Communicator>, CommError> {
        let part = self.inner.split(name, groups)?;
        Ok(Arc::new(Self {
            group: part.group().clone(),
            inner: match self.defect {
                Defect::WrongGroup if groups.len() > 1 => Arc::clone(&self.inner),
                _ => part,
            },
            whole: Arc::clone(&self.whole),
            pool: Arc::clone(&self.pool),
            received: Arc::clone(&self.received),
            defect: self.defect,
        }))
    }

    fn start_all(&self, calls: Vec<(Call, Buffer)>) -> Result<Vec<Pending>, CommError> {
        for (call, input) in &calls {
            call.check(self.group(), input)?;
        }
        let calls = calls.into_iter();
        let started = calls.map(|(call, input)| self.start(call, input));
        let mut started: Vec<_> = started.collect::<Result<_, _>>()?;
        if self.defect == Defect::ReversedHandles {
            started.reverse();
        }
        Ok(started)
    }

    fn pool(&self) -> Option<&Arc<BufferPool>> {
        match self.defect {
            Defect::ForgetfulPool => Some(&self.pool),
            _ => self.inner.pool(),
        }
    }
}

/// A communicator that completes every call locally.
#[derive(Debug)]
pub(super) struct Blind(pub Arc<dyn Communicator>);

impl Communicator for Blind {
    fn group(&self) -> &Group {
        self.0.group()
    }

    fn start(&self, _call: Call, input: Buffer) -> Result<Pending, CommError> {
        Ok(Pending::ready(input))
    }

    fn split(&self, name: &str, groups: &[Vec<usize>]) -> Result<Arc<dyn Communicator>, CommError> {
        self.0.split(name, groups)
    }
}

fn with_defect(defect: Defect) -> Result<Vec<ConformanceReport>, WorldError> {
    let options = ConformanceOptions {
        programs: 30,
        sizes: vec![1, 30],
        long: 5000,
        ..small()
    };
    let world = World::threads(4)?
        .compute_threads(1)
        .deadline(Duration::from_secs(5))
        .call_log_dir(std::env::current_exe().unwrap().join("none"));
    world.run(|rank| {
        let world = Defective::over(rank.communicator(), defect);
        run(&world, &options, &mut |_| {})
    })
}

#[test]
fn every_defect_is_found_in_the_case_that_is_about_it() {
    with_defect(Defect::None).unwrap();
    for (defect, wanted) in DEFECTS {
        let Err(WorldError::RankFailed { rank, source, .. }) = with_defect(defect) else {
            panic!("{defect:?} was not found");
        };
        let error = source.downcast::<ConformanceError>().unwrap();
        let (ConformanceError::Wrong {
            case, rank: told, ..
        }
        | ConformanceError::Failed {
            case, rank: told, ..
        }) = &*error
        else {
            panic!("{error}")
        };
        assert_eq!((*case, *told), (wanted, rank), "{defect:?}: {error}");
        assert!(error.to_string().contains(" over "), "{error}");
    }
}
