//! Tests of collectives on several flat tensors in one call.

use std::sync::{Arc, Mutex};

use burn::tensor::{DType, Device, Tensor};

use super::super::*;
use super::{integers, over, own, tensor};
use crate::comm::{Buffer, BufferPool, Call, CommError, Communicator, Group, Pending, ReduceOp};

fn flat(rank: usize, len: usize) -> Tensor<1> {
    tensor(&own(rank, len), [len], &Device::flex(), DType::F32)
}

#[test]
fn several_tensors_give_what_each_gives_alone() {
    for ranks in [1, 2, 4] {
        over(ranks, |comm| {
            let xs = || [8, 4, 12].map(|len| flat(comm.rank(), len));
            let wait = |pending: Vec<PendingTensor<1>>| -> Vec<Vec<i64>> {
                let tensors = pending.into_iter().map(PendingTensor::wait);
                tensors.map(integers).collect()
            };
            let alone = |f: &dyn Fn(Tensor<1>) -> PendingTensor<1>| -> Vec<Vec<i64>> {
                xs().into_iter().map(|x| integers(f(x).wait())).collect()
            };
            assert_eq!(
                wait(start_reduce_scatter_coalesced(xs().into(), &comm)),
                alone(&|x| start_reduce_scatter(x, 0, &comm))
            );
            assert_eq!(
                wait(start_all_reduce_coalesced(
                    xs().into(),
                    ReduceOp::Max,
                    &comm
                )),
                alone(&|x| start_all_reduce(x, ReduceOp::Max, &comm))
            );
            assert_eq!(
                wait(start_all_gather_coalesced(xs().into(), &comm)),
                alone(&|x| start_all_gather(x, 0, &comm))
            );
            assert!(start_all_gather_coalesced(vec![], &comm).is_empty());
        });
    }
}

/// Records the number of calls that are started as one.
#[derive(Debug)]
struct Together(Comm, Mutex<Vec<usize>>);

impl Communicator for Together {
    fn group(&self) -> &Group {
        self.0.group()
    }

    fn start(&self, call: Call, input: Buffer) -> Result<Pending, CommError> {
        self.1.lock().unwrap().push(1);
        self.0.start(call, input)
    }

    fn start_all(&self, calls: Vec<(Call, Buffer)>) -> Result<Vec<Pending>, CommError> {
        self.1.lock().unwrap().push(calls.len());
        self.0.start_all(calls)
    }

    fn split(&self, name: &str, groups: &[Vec<usize>]) -> Result<Comm, CommError> {
        self.0.split(name, groups)
    }

    fn pool(&self) -> Option<&Arc<BufferPool>> {
        self.0.pool()
    }
}

#[test]
fn several_tensors_are_one_call() {
    over(2, |comm| {
        let together = Arc::new(Together(comm, Mutex::default()));
        let comm: Comm = together.clone();
        let xs = || [8, 4].map(|len| flat(comm.rank(), len)).to_vec();
        let pending = [
            start_reduce_scatter_coalesced(xs(), &comm),
            start_all_reduce_coalesced(xs(), ReduceOp::Sum, &comm),
            start_all_gather_coalesced(xs(), &comm),
        ];
        drop(pending);
        assert_eq!(*together.1.lock().unwrap(), [2, 2, 2]);
    });
}
