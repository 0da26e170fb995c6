//! Tests frozen parameters: the other parameters have the same gradients as without freezing.

use std::collections::BTreeMap;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_megatron::comm::ParallelContext;
use burn_megatron::data_parallel::{DataParallelConfig, DistributedDataParallel, Precision};
use burn_megatron::model::{LanguageModel, ModelConfig};
use burn_megatron::nn::RecomputeModule::{Activation, CoreAttention, MlaUpProjection, Moe, Norm};
use burn_megatron::nn::{ModelBuilder, RecomputeConfig, RecomputeMethod};
use burn_megatron_models::{Transformer, TransformerConfig};
use burn_megatron_tests::TransformerSubject;
use burn_megatron_tests::{
    small_gemma, small_gpt, small_gpt_oss, small_llama, small_olmoe, without_dropout,
};
use burn_megatron_train::TrainConfig;
use burn_megatron_verify::{Layout, VerifyOptions, verify};

/// The gradient of each trained parameter, by path.
type Gradients = BTreeMap<String, Vec<f64>>;

fn gradients(
    config: &TransformerConfig,
    recompute: &RecomputeConfig,
    freeze: Vec<String>,
) -> Gradients {
    let (groups, device) = (ParallelContext::single(), Device::flex());
    let scope = ModelBuilder::with(&groups, &device, 3, DType::F64);
    let model = config.init_with(scope.with_recompute(recompute).unwrap());
    let settings = DataParallelConfig {
        precision: Precision::F64,
        freeze,
        ..DataParallelConfig::default()
    };
    let mut ddp = DistributedDataParallel::with(model.unwrap(), &groups, &settings).unwrap();
    let shape = [2, config.context];
    let tokens = |factor: usize| {
        let ids = (0..shape[0] * shape[1]).map(|i| (i * factor % config.vocabulary) as i64);
        let ids = TensorData::new(ids.collect::<Vec<_>>(), shape);
        Tensor::<2, Int>::from_data(ids, &device.clone().autodiff())
    };
    let losses = |model: &Transformer| model.losses(tokens(7), tokens(5)).sum();
    let loss = ddp.forward(&device, losses);
    ddp.backward_last(loss);
    let reduced = ddp.reduce(1).unwrap();
    let values = ddp.full_gradients(&reduced).into_iter();
    let entries = ddp.table().entries().iter();
    entries
        .zip(values)
        .map(|(entry, value)| (entry.path.clone(), value.into_data().iter().collect()))
        .collect()
}

/// Returns several halves of the parameters to freeze. For any two parameters, one of the halves contains the first
/// parameter but not the second.
fn halves(paths: &[&String]) -> Vec<Vec<String>> {
    let bits = usize::BITS - paths.len().leading_zeros();
    let half = |bit: u32, value: usize| {
        let own = |(number, _): &(usize, _)| number >> bit & 1 == value;
        let chosen = paths.iter().enumerate().filter(own);
        chosen.map(|(_, path)| path.to_string()).collect()
    };
    (0..bits)
        .flat_map(|bit| [half(bit, 0), half(bit, 1)])
        .collect()
}

fn check(name: &str, config: &TransformerConfig, recompute: &RecomputeConfig) {
    let all = gradients(config, recompute, vec![]);
    let mut cases = halves(&all.keys().collect::<Vec<_>>());
    cases.push(vec!["blocks.0.**".into()]);
    for freeze in cases {
        let found = gradients(config, recompute, freeze.clone());
        assert!(found.len() < all.len(), "{name}: {freeze:?}");
        for (path, gradient) in found {
            let expected = &all[&path];
            let largest = expected.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
            let differs = |(a, b): (&f64, &f64)| (a - b).abs() > 1e-12 * (1.0 + largest);
            assert!(
                !gradient.iter().zip(expected).any(differs),
                "{name}, {recompute:?}: {path} with {freeze:?}"
            );
        }
    }
}

fn deepseek() -> TransformerConfig {
    let llama = small_llama().config;
    let TransformerConfig { mla, moe, .. } = TransformerConfig::deepseek();
    TransformerConfig {
        groups: None,
        mla,
        moe,
        ..llama
    }
}

fn gpt() -> TransformerConfig {
    TransformerConfig {
        init_std: 0.2,
        ..without_dropout(small_gpt()).config
    }
}

fn parts() -> RecomputeConfig {
    RecomputeConfig::selective([Norm, Activation, CoreAttention])
}

#[test]
fn frozen_parameters_leave_the_gradients_of_the_others() {
    let none = RecomputeConfig::default();
    check("gpt", &gpt(), &none);
    check("gpt", &gpt(), &parts());
    check("gpt-oss", &small_gpt_oss().config, &none);
}

#[test]
#[ignore = "slow: every kind of layer, recomputed in every way"]
fn frozen_parameters_of_every_family_leave_the_gradients_of_the_others() {
    let latents = RecomputeConfig::selective([Norm, Activation, MlaUpProjection]);
    let families = [
        ("gpt with dropout", small_gpt().config),
        ("gpt", gpt()),
        ("llama", small_llama().config),
        ("olmoe", small_olmoe().config),
        ("gpt-oss", small_gpt_oss().config),
        ("gemma", small_gemma().config),
        ("deepseek", deepseek()),
    ];
    for (name, config) in &families {
        check(name, config, &RecomputeConfig::default());
        let parts = if config.mla.is_some() {
            latents.clone()
        } else {
            parts()
        };
        check(name, config, &parts);
        let all = RecomputeConfig::full(RecomputeMethod::Uniform, 1);
        check(name, config, &all);
    }
    check(
        "olmoe",
        &small_olmoe().config,
        &RecomputeConfig::selective([Norm, Moe]),
    );
}

#[test]
#[ignore = "slow: many layouts"]
fn frozen_parameters_of_every_kind_are_frozen_in_every_layout() {
    let layouts: Vec<Layout> = [
        "tp2-sp-dp2-mb1-z1",
        "dp2-mb1-z2",
        "dp2-mb1-z3",
        "tp2-pp2-dp2-mb1-z3/1f1b",
        "pp2-mb1/zb-h1",
        "cp2-mb2",
    ]
    .iter()
    .map(|name| name.parse().unwrap())
    .collect();
    let patterns: [&[&str]; 7] = [
        &["blocks.0.**"],
        &["**.bias"],
        &["blocks.**.weight"],
        &["**.*norm*.weight"],
        &["embedding.**"],
        &["**.mlp.**"],
        &["**.attention.**"],
    ];
    for subject in [without_dropout(small_gpt()), small_gpt_oss(), small_gemma()] {
        for patterns in patterns {
            assert_passes(&subject, patterns, &layouts);
        }
    }
}

fn assert_passes(subject: &TransformerSubject, patterns: &[&str], layouts: &[Layout]) {
    let options = VerifyOptions {
        train: TrainConfig {
            data_parallel: DataParallelConfig {
                freeze: patterns.iter().map(ToString::to_string).collect(),
                ..DataParallelConfig::default()
            },
            ..VerifyOptions::default().train
        },
        ..VerifyOptions::default()
    };
    match verify(subject, layouts, &options) {
        Ok(report) => assert!(report.passes(), "{patterns:?}\n{report}"),
        // The model has no such parameters.
        Err(error) => assert!(
            error.to_string().contains("matches no parameter"),
            "{error}"
        ),
    }
}
