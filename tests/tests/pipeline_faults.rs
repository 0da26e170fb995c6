//! Tests that `verify` finds transfers that are delivered to the wrong micro-batch.

use std::sync::{Arc, Mutex};

use burn::tensor::Device;
use burn_megatron::comm::{
    Buffer, BufferPool, Call, CommError, Communicator, Group, ParallelContext, Pending,
};
use burn_megatron::data_parallel::{
    DataParallelConfig, DataParallelError, DistributedDataParallel,
};
use burn_megatron::mesh::{Axis, Grid};
use burn_megatron::nn::{BuildError, ParallelModule};
use burn_megatron_data::Samples;
use burn_megatron_models::Transformer;
use burn_megatron_tests::TransformerSubject;
use burn_megatron_tests::small_gpt;
use burn_megatron_verify::{Subject, VerifyOptions, verify};

/// A communicator that swaps its first two tensors: it sends the first tensor after the second.
#[derive(Debug)]
struct Swapped {
    inner: Arc<dyn Communicator>,
    held: Mutex<Held>,
}

#[derive(Debug)]
enum Held {
    Nothing,
    First(usize, Buffer),
    Done,
}

impl Communicator for Swapped {
    fn group(&self) -> &Group {
        self.inner.group()
    }

    fn start(&self, call: Call, input: Buffer) -> Result<Pending, CommError> {
        let Call::Send { to } = call else {
            return self.inner.start(call, input);
        };
        if !input.dtype().is_float() {
            return self.inner.start(call, input);
        }
        let mut held = self.held.lock().unwrap();
        match std::mem::replace(&mut *held, Held::Done) {
            Held::Nothing => {
                let dtype = input.dtype();
                *held = Held::First(to, input);
                Ok(Pending::ready(Buffer::empty(dtype)))
            }
            Held::First(first, tensor) => {
                assert_eq!(first, to);
                let second = self.inner.start(call, input)?;
                self.inner.start_send(tensor, to)?.wait()?;
                Ok(second)
            }
            Held::Done => self.inner.start(call, input),
        }
    }

    fn split(&self, name: &str, groups: &[Vec<usize>]) -> Result<Arc<dyn Communicator>, CommError> {
        self.inner.split(name, groups)
    }

    fn pool(&self) -> Option<&Arc<BufferPool>> {
        self.inner.pool()
    }
}

/// A model in which the given pipeline rank swaps its first two transfers.
struct SwappingSubject {
    model: TransformerSubject,
    rank: Option<usize>,
}

impl Subject for SwappingSubject {
    type Model = Transformer;

    fn build(
        &self,
        groups: &ParallelContext,
        device: &Device,
    ) -> Result<ParallelModule<Transformer>, BuildError> {
        self.model.build(groups, device)
    }

    fn wrap(
        &self,
        model: ParallelModule<Transformer>,
        groups: &ParallelContext,
        config: &DataParallelConfig,
    ) -> Result<DistributedDataParallel<Transformer>, DataParallelError> {
        let pipeline = groups.pipeline();
        let swaps = pipeline.size() > 1 && self.rank == Some(pipeline.rank());
        let mut groups = groups.clone();
        if swaps {
            let swapped = Arc::new(Swapped {
                inner: pipeline.clone(),
                held: Mutex::new(Held::Nothing),
            });
            groups = groups.with_group(Grid::Dense, Axis::Pipeline, swapped);
        }
        DistributedDataParallel::with(model, &groups, config)
    }

    fn samples(&self) -> usize {
        Subject::samples(&self.model)
    }

    fn data(&self, groups: &ParallelContext) -> Arc<dyn Samples> {
        self.model.data(groups)
    }

    fn layers(&self) -> usize {
        self.model.layers()
    }
}

/// Rank 0 sends activations, and rank 1 sends gradients. Each tensor is delivered to the micro-batch next to its own.
#[test]
fn a_transfer_of_another_micro_batch_is_found() {
    let run = |rank| {
        let model = small_gpt();
        // With GPipe, no rank waits for the held tensor before it sends the next tensor.
        let layouts = ["pp2-mb1/gpipe".parse().unwrap()];
        let subject = SwappingSubject { model, rank };
        verify(&subject, &layouts, &VerifyOptions::default()).unwrap()
    };
    assert!(run(None).passes());
    for rank in [0, 1] {
        let report = run(Some(rank));
        let found = &report.rows()[0].1;
        let failing = found.failing(VerifyOptions::default().tolerance);
        for column in [
            "loss",
            "parameter grad",
            "last grad",
            "grad norm",
            "final weights",
        ] {
            assert!(failing.contains(&column), "rank {rank}, {column}\n{report}");
        }
    }
}
