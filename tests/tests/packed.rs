//! Tests that packed documents train as if each document were a separate sequence.

use std::sync::Arc;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_megatron::comm::ParallelContext;
use burn_megatron::data_parallel::DistributedDataParallel;
use burn_megatron::kernel_selection::{KernelChoice, KernelChoices};
use burn_megatron::model::{LanguageModel, ModelConfig, Tokens};
use burn_megatron::nn::{ModelBuilder, QkNorm};
use burn_megatron::pipeline::split::LayerSplit;
use burn_megatron_models::TransformerConfig;
use burn_megatron_tests::TransformerSubject;
use burn_megatron_tests::{long_rope, small_gpt, small_llama};
use burn_megatron_verify::{Layout, VerifyOptions, verify};

/// The starts of the documents of two rows of eight tokens, and the end of the last document.
const BORDERS: [i32; 6] = [0, 3, 8, 12, 13, 16];
const ROWS: usize = 2;
const SEQ: usize = 8;

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.into_data().iter::<f64>().collect()
}

/// Returns models with both kinds of positions, fused and unfused attention, a window, and QK norms.
fn models() -> Vec<(String, TransformerConfig, KernelChoices)> {
    let still = |config: TransformerConfig| TransformerConfig {
        dropout: 0.0,
        attention_dropout: 0.0,
        ..config
    };
    let seen = TransformerConfig {
        window: Some(2),
        // Some documents are longer than the original context.
        positions: long_rope(4, 3),
        qk_norm: Some(QkNorm::Heads),
        qkv_bias: Some(true),
        ..small_llama().config
    };
    let models = [
        ("GPT", small_gpt().config),
        ("Llama", small_llama().config),
        ("Llama with a window", seen),
    ];
    let choices = [KernelChoice::Auto, KernelChoice::Unfused].map(KernelChoices::all);
    let each = models.into_iter().flat_map(|(name, config)| {
        choices.clone().map(|choices| {
            let what = format!("{name}, attention {:?}", choices.attention);
            (what, still(config.clone()), choices)
        })
    });
    each.collect()
}

/// The shape, the tokens and the documents of a forward pass.
type Piece = ([usize; 2], Vec<i64>, Option<Arc<[i32]>>);

/// Returns the loss, the gradient of the embedded input, and the gradients of all parameters over several forward
/// passes.
fn gradients(
    config: &TransformerConfig,
    choices: &KernelChoices,
    batches: &[Piece],
) -> Vec<Vec<f64>> {
    let (groups, device) = (ParallelContext::single(), Device::flex());
    let scope = ModelBuilder::with(&groups, &device, 3, DType::F64);
    let scope = scope.with_kernels(choices).unwrap();
    // The embedding is a separate stage, so that its output is an input.
    let split = LayerSplit::Layout(format!("E|t*{}L", config.layers));
    let stages = split.stages(config.layers, 2).unwrap();
    let stages: Vec<_> = stages.into_iter().enumerate().collect();
    let model = config.init_stages(scope, &stages).unwrap();
    let mut ddp = DistributedDataParallel::new(model, &groups).unwrap();
    let device = device.autodiff();
    let (mut loss, mut input) = (0.0, vec![]);
    for (shape, ids, documents) in batches {
        let ids = |shift: i64| {
            let ids = ids.iter().map(|id| (id + shift) % 21).collect();
            Tensor::<2, Int>::from_data(TensorData::new(ids, *shape), &device)
        };
        let tokens = Tokens {
            ids: ids(0),
            documents: documents.clone(),
            sorted: None,
            router_step: None,
            nodes: None,
            shard: None,
            real: None,
            further: vec![],
        };
        let size = [shape[0], shape[1], config.hidden];
        let offset = Tensor::<3>::zeros(size, (&device, DType::F64)).require_grad();
        let sum = ddp.forward(&device, |model| {
            let embedded = model.hidden(0, None, tokens.clone()) + offset.clone();
            let hidden = model.hidden(1, Some(embedded), tokens);
            model.losses_of(hidden, ids(5)).objective.sum()
        });
        loss += values(sum.clone().inner())[0];
        let leaves = ddp.backward(sum);
        input.extend(values(offset.grad(&leaves).unwrap()));
    }
    let sums = ddp.reduce((ROWS * SEQ) as u64).unwrap();
    let parameters = ddp.full_gradients(&sums).into_iter().map(values);
    [vec![loss], input].into_iter().chain(parameters).collect()
}

#[test]
fn a_packed_batch_equals_its_separate_documents() {
    let ids: Vec<i64> = (0..(ROWS * SEQ) as i64)
        .map(|i| (i * i * 7 + 3) % 21)
        .collect();
    let packed = [([ROWS, SEQ], ids.clone(), Some(Arc::from(BORDERS)))];
    let rows = [([ROWS, SEQ], ids.clone(), None)];
    let alone = BORDERS.windows(2).map(|pair| {
        let (begin, end) = (pair[0] as usize, pair[1] as usize);
        ([1, end - begin], ids[begin..end].to_vec(), None)
    });
    let alone: Vec<_> = alone.collect();
    for (what, config, choices) in models() {
        let [packed, alone, rows] =
            [&packed[..], &alone, &rows].map(|batches| gradients(&config, &choices, batches));
        assert_eq!(packed.len(), alone.len());
        assert_ne!(packed[0], rows[0], "{what}: documents matter");
        for (i, (found, expected)) in packed.iter().zip(&alone).enumerate() {
            let largest = expected.iter().fold(0.0f64, |most, x| most.max(x.abs()));
            assert!(largest > 0.0);
            for (found, expected) in found.iter().zip(expected) {
                let apart = (found - expected).abs() / largest;
                assert!(apart < 1e-12, "{what}, {i}: {found} and {expected}");
            }
        }
    }
}

#[test]
fn every_layout_trains_on_documents_as_one_rank_does() {
    let layouts = [
        "tp2",
        "tp2-sp",
        "tp4-sp",
        "pp2-mb1",
        "pp2-mb2",
        "pp2-mb1/interleaved/v2",
        "pp2-mb1/zb-v/v2",
        "tp2-sp-dp2",
        "tp2-sp-pp2-mb1",
        "dp2-z3",
    ];
    let layouts = layouts.map(|layout| layout.parse::<Layout>().unwrap());
    for (what, mut config, kernels) in models() {
        config.layers = 4;
        let subject = TransformerSubject {
            config,
            kernels,
            packed: true,
            ..small_gpt()
        };
        let options = VerifyOptions {
            steps: 2,
            ..VerifyOptions::default()
        };
        let report = verify(&subject, &layouts, &options).unwrap();
        assert!(report.passes(), "{what}\n{report}");
    }
}

/// Tests with dropout. The dropout masks depend on the rows.
#[test]
fn layouts_agree_with_dropout_too() {
    let subject = TransformerSubject {
        packed: true,
        ..small_gpt()
    };
    let layouts = ["tp2-sp", "tp2-dp2", "pp2-mb1"].map(|layout| layout.parse().unwrap());
    let report = verify(&subject, &layouts, &VerifyOptions::default()).unwrap();
    assert!(report.passes(), "\n{report}");
}
