//! On a CUDA device, a graph of a micro-batch does what its launches do.
#![cfg(feature = "cuda")]

use burn::backend::{Backend, Dispatch};
use burn::tensor::{Device, Tensor};
use burn_megatron::comm::ParallelContext;
use burn_megatron::data_parallel::DistributedDataParallel;
use burn_megatron::nn::ModelBuilder;
use burn_megatron::train::{LanguageModel, ModelConfig, Tokens};
use burn_megatron_models::{Transformer, TransformerConfig};
use burn_megatron_tests::{gpu, small_gpt, small_llama};

const ROWS: usize = 2;

/// A model without dropout, whose masks differ from step to step, and a micro-batch for it.
struct Step {
    ddp: DistributedDataParallel<Transformer>,
    tokens: Tokens,
    device: Device,
}

impl Step {
    fn new(config: &TransformerConfig) -> Self {
        let device = gpu();
        let config = TransformerConfig {
            layers: 2,
            dropout: 0.0,
            attention_dropout: 0.0,
            ..config.clone()
        };
        let groups = ParallelContext::single();
        let model = config.init_with(ModelBuilder::new(&groups, &device.clone().autodiff()));
        let ids: Vec<i32> = (0..ROWS * config.context).map(|i| i as i32 % 7).collect();
        Self {
            ddp: DistributedDataParallel::new(model.unwrap(), &groups).unwrap(),
            tokens: Tokens::new(&ids, [ROWS, config.context], &device.clone().autodiff()),
            device,
        }
    }

    /// The forward and the backward of the micro-batch; its loss.
    fn run(&self) -> Tensor<1> {
        let (tokens, targets) = (self.tokens.clone(), self.tokens.ids.clone());
        let forward = |model: &Transformer| model.losses(tokens, targets).sum();
        let loss = self.ddp.forward(&self.device, forward);
        self.ddp.backward(loss.clone());
        loss.inner()
    }

    /// The gradients of all micro-batches since the last call.
    fn gradients(&mut self) -> Vec<Vec<f32>> {
        let gradients = self.ddp.reduce(1).unwrap();
        let all = self.ddp.full_gradients(&gradients).into_iter();
        all.map(values).collect()
    }
}

fn values(x: Tensor<1>) -> Vec<f32> {
    x.into_data().try_into_vec().unwrap()
}

/// Nothing in a micro-batch reads from the device, waits for it or allocates beyond what one before has used, and its
/// products, attention and sums are all captured; so a replay adds to the gradients what launches would.
#[test]
fn a_micro_batch_is_captured_and_replayed() {
    for config in [small_gpt().config, small_llama().config] {
        let mut step = Step::new(&config);
        let losses: Vec<_> = (0..4).map(|_| values(step.run())).collect();
        let expected = step.gradients();

        step.run();
        let device = step.device.clone();
        let device = device.as_dispatch();
        Dispatch::graph_prepare(device).unwrap();
        step.run();
        Dispatch::graph_start_capture(device).unwrap();
        let loss = step.run();
        let graph = Dispatch::graph_stop_capture(device).unwrap();
        for _ in 0..2 {
            // SAFETY: the loss and the gradients are alive, and used by no other stream.
            unsafe { Dispatch::graph_replay(device, &graph) }.unwrap();
        }
        assert_eq!(values(loss), losses[3]);
        assert!(step.gradients() == expected, "gradients of other bits");
    }
}
