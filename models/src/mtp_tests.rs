use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_megatron::comm::ParallelContext;
use burn_megatron::data_parallel::DistributedDataParallel;
use burn_megatron::model::{LanguageModel, ModelConfig};
use burn_megatron::nn::moe::MoeForward;
use burn_megatron::nn::{AttentionContext, LossFactor, ModelBuilder, Tokens};
use insta::assert_snapshot;

use super::Transformer;
use crate::{MlaConfig, MoeConfig, MtpConfig, TransformerConfig};

const ROWS: usize = 2;
const SEQ: usize = 10;
const VOCABULARY: usize = 21;

fn config(depths: usize) -> TransformerConfig {
    TransformerConfig {
        vocabulary: VOCABULARY,
        context: SEQ,
        hidden: 16,
        layers: 2,
        heads: 2,
        mlp_width: Some(24),
        init_std: 0.3,
        z_loss: 0.01,
        mla: Some(MlaConfig {
            q_rank: Some(6),
            kv_rank: 8,
            nope_width: 4,
            rope_width: 4,
            value_width: 6,
            norm_epsilon: 1e-6,
        }),
        moe: Some(MoeConfig {
            experts: 4,
            expert_width: Some(8),
            shared_width: Some(8),
            groups: None,
            losses: vec![],
            ..MoeConfig::deepseek()
        }),
        mtp: Some(MtpConfig {
            layers: depths,
            loss_scaling_factor: 0.3,
        }),
        ..TransformerConfig::deepseek()
    }
}

fn ids(device: &Device) -> Tensor<2, Int> {
    let numbers = 0..(ROWS * SEQ) as i64;
    let ids: Vec<_> = numbers
        .map(|i| (i * i * 7 + 3) % VOCABULARY as i64)
        .collect();
    Tensor::from_data(TensorData::new(ids, [ROWS, SEQ]), device)
}

/// Returns the ids shifted by `depth` to the left. The free positions at the end are filled with `fill`.
fn shifted(ids: &Tensor<2, Int>, depth: usize, fill: i64) -> Tensor<2, Int> {
    let end = Tensor::full([ROWS, depth], fill, &ids.device());
    Tensor::cat(vec![ids.clone().narrow(1, depth, SEQ - depth), end], 1)
}

fn to_f64<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data().try_into_vec().unwrap()
}

/// Returns the objective as in a training step. Each MTP module has separate targets, and the last targets are ignored.
fn objective(model: &Transformer, depths: usize) -> Tensor<1> {
    let ids = ids(&Device::flex().autodiff());
    let targets = shifted(&ids, 1, 4);
    let mut tokens = Tokens::from(ids.clone());
    let further = (1..=depths).map(|depth| shifted(&ids, depth, 0).into());
    tokens.further = further.collect();
    let further = (1..=depths).map(|depth| shifted(&targets, depth, Transformer::IGNORE));
    let targets = [targets.clone()].into_iter().chain(further).collect();
    let (hidden, targets) = (model.hidden(0, None, tokens), Tensor::cat(targets, 0));
    let sums = model.loss_sums_of(hidden, targets, &LossFactor::Number(1.0));
    let parts = to_f64(sums.parts.unwrap());
    let whole = to_f64(sums.objective.clone().inner())[0];
    // The parts are the cross-entropy, its z-loss, and the loss of the further tokens.
    assert_eq!(parts.len(), model.loss_terms().len() + 1);
    assert!((parts.iter().sum::<f64>() - whole).abs() < 1e-12 * whole);
    sums.objective
}

/// Returns the same objective, computed with a shorter sequence for each further module, without filled or ignored
/// values.
fn by_slices(model: &Transformer, depths: usize) -> Tensor<1> {
    let ids = ids(&Device::flex().autodiff());
    let targets = shifted(&ids, 1, 4);
    let loss = |hidden: Tensor<3>, depth: usize| {
        let targets = targets.clone().narrow(1, depth, SEQ - depth);
        let (output, embedding) = (model.output(), model.embedding.as_ref());
        let losses = model.loss.losses(hidden, output, embedding, targets);
        losses.objective.sum()
    };
    let mut before = model.hidden(0, None, ids.clone().into());
    let mut sum = loss(before.clone(), 0);
    for (layer, depth) in model.mtp.iter().zip(1..) {
        let later = ids.clone().narrow(1, depth, SEQ - depth);
        let embedded = model.embedding.as_ref().unwrap().forward(later);
        let hidden = before.clone().narrow(1, 0, SEQ - depth);
        before = layer.forward(hidden, embedded, model.layout, |_, block, x| {
            let rotary = model.rotary.of(block);
            block.forward(
                x,
                rotary,
                model.layout,
                AttentionContext::Rows,
                MoeForward::default(),
            )
        });
        sum = sum + loss(before.clone(), depth).mul_scalar(0.3 / depths as f64);
    }
    sum
}

/// Returns the loss, followed by the gradients of all parameters.
fn gradients(depths: usize, loss: impl Fn(&Transformer) -> Tensor<1>) -> Vec<Vec<f64>> {
    let (groups, device) = (ParallelContext::single(), Device::flex());
    let builder = ModelBuilder::with(&groups, &device, 3, DType::F64);
    let model = config(depths).init_with(builder).unwrap();
    let mut ddp = DistributedDataParallel::new(model, &groups).unwrap();
    let sum = ddp.forward(&device.autodiff(), |model| loss(model));
    let value = to_f64(sum.clone().inner());
    ddp.backward(sum);
    let sums = ddp.reduce((ROWS * SEQ) as u64).unwrap();
    let full = ddp.full_gradients(&sums).into_iter();
    let full = full.map(to_f64);
    [value].into_iter().chain(full).collect()
}

#[test]
fn each_depth_predicts_a_later_token() {
    for depths in [1, 2] {
        let expected = gradients(depths, |model| by_slices(model, depths));
        let found = gradients(depths, |model| objective(model, depths));
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(&expected) {
            let largest = expected.iter().fold(0.0f64, |most, x| most.max(x.abs()));
            for (found, expected) in found.iter().zip(expected) {
                assert!((found - expected).abs() <= 1e-12 * largest);
            }
        }
        let moved = found.iter().filter(|of| of.iter().any(|x| *x != 0.0));
        // All parameters have a gradient except the expert biases.
        assert!(moved.count() + 1 + depths >= found.len());
    }
}

/// The log-probabilities of generated text are computed from these losses.
#[test]
fn losses_of_tokens_are_those_of_the_next_ones() {
    let groups = ParallelContext::single();
    let plain = TransformerConfig {
        mtp: None,
        ..config(1)
    };
    let [one, other] = [config(1), plain].map(|config| {
        let model = config.init(&groups, &Device::flex()).unwrap().module;
        let ids = ids(&Device::flex());
        let losses = model.losses(ids.clone(), shifted(&ids, 1, 4));
        losses.into_data().try_into_vec::<f32>().unwrap()
    });
    assert_eq!(one.len(), ROWS * SEQ);
    assert_eq!(one, other);
}

#[test]
fn settings_that_do_not_fit_are_refused() {
    let refused = |change: fn(&mut TransformerConfig)| {
        let mut config = config(1);
        change(&mut config);
        config.check(1, false).unwrap_err().to_string()
    };
    let of = |config: &mut TransformerConfig| config.mtp.take().unwrap();
    assert_snapshot!(
        refused(|config| config.mtp.as_mut().unwrap().layers = 0),
        @"model: invalid mtp.layers = 0: expected at least 1"
    );
    assert_snapshot!(
        refused(|config| config.mtp.as_mut().unwrap().layers = SEQ),
        @"model: invalid mtp.layers = 10 for a context of 10: expected fewer than the tokens of the context"
    );
    assert_snapshot!(
        refused(|config| config.mtp.as_mut().unwrap().loss_scaling_factor = 0.0),
        @"model: invalid mtp.loss_scaling_factor = 0: expected a number above 0 and finite in f32; leave out \
          [model.mtp] to predict the next token alone"
    );
    let gpt = TransformerConfig {
        mtp: Some(of(&mut config(1))),
        ..TransformerConfig::gpt2()
    };
    assert_snapshot!(
        gpt.check(1, false).unwrap_err(),
        @"model: mtp requires rotary positions, but the model has learned positions: remove mtp"
    );
}
