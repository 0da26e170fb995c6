//! Adapters: every layout computes what one rank does, and frozen weights have values only.

use burn::tensor::{DType, Device};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::data_parallel::{DataParallelConfig, DistributedDataParallel, Precision};
use burn_megatron::mesh::Axis;
use burn_megatron::nn::ParameterEntry;
use burn_megatron::nn::lora::LoraConfig;
use burn_megatron::verify::{Layout, ModelSubject, Subject, VerifyOptions, VerifyReport, verify};
use burn_megatron_models::{MoeConfig, TransformerConfig};
use burn_megatron_tests::tampered::Tampered;

fn model() -> TransformerConfig {
    TransformerConfig {
        vocabulary: 19,
        context: 8,
        hidden: 16,
        layers: 2,
        heads: 4,
        groups: Some(2),
        mlp_width: Some(12),
        init_std: 0.2,
        ..TransformerConfig::llama()
    }
}

/// Adapters with values in both factors, so that both have gradients from the first step on.
fn lora(targets: &[&str]) -> LoraConfig {
    LoraConfig {
        rank: 3,
        alpha: 6.0,
        target_modules: targets.iter().map(ToString::to_string).collect(),
        init_lora_weights: false,
        ..LoraConfig::default()
    }
}

fn subject(config: TransformerConfig, lora: LoraConfig) -> ModelSubject<TransformerConfig> {
    ModelSubject {
        samples: 4,
        lora: Some(lora),
        ..ModelSubject::new(config)
    }
}

fn run(subject: &impl Subject, layouts: &[&str]) -> VerifyReport {
    let layouts: Vec<Layout> = layouts.iter().map(|text| text.parse().unwrap()).collect();
    let options = VerifyOptions {
        steps: 3,
        learning_rate: 0.01,
        ..VerifyOptions::default()
    };
    verify(subject, &layouts, &options).unwrap()
}

fn assert_equal(subject: &impl Subject, layouts: &[&str]) {
    let report = run(subject, layouts);
    assert!(report.passes(), "{report}");
}

#[test]
fn every_layout_computes_what_one_rank_does() {
    let layouts = [
        "tp2-mb2",
        "tp2-sp-mb2",
        // Two ranks hold the same keys and values.
        "tp4-sp-mb4",
        "dp2-mb1-z1",
        "dp2-mb1-z2",
        "dp2-mb1-z3",
        "dp4-mb1-z3-hsdp2",
        "cp2-mb2",
        "pp2-mb2/1f1b",
        "pp2-mb1/zb-h1",
        "tp2-sp-dp2-mb1-z3",
        "tp2-sp-pp2-dp2-mb1-z2/1f1b",
        "tp2-pp2-dp2-mb1-z3/1f1b",
    ];
    assert_equal(&subject(model(), lora(&["all-linear"])), &layouts);
}

#[test]
fn sections_without_adapters_dropout_and_biases() {
    let targets = ["q_proj", "v_proj", "down_proj"];
    let with_dropout = LoraConfig {
        dropout: 0.2,
        rslora: true,
        ..lora(&targets)
    };
    let layouts = ["tp2-mb2", "tp2-sp-dp2-mb1-z3", "pp2-mb2/1f1b"];
    let gpt = TransformerConfig {
        dropout: 0.1,
        groups: None,
        ..TransformerConfig {
            vocabulary: 21,
            mlp_width: Some(12),
            hidden: 16,
            layers: 2,
            context: 8,
            init_std: 0.2,
            ..TransformerConfig::gpt2()
        }
    };
    assert_equal(&subject(gpt, with_dropout.clone()), &layouts);
    assert_equal(&subject(model(), with_dropout), &["cp2-mb2"]);
    let attention = lora(&["q_proj", "o_proj"]);
    let moe = TransformerConfig {
        moe: Some(MoeConfig {
            experts: 4,
            expert_width: Some(8),
            ..MoeConfig::default()
        }),
        ..model()
    };
    let layouts = ["tp2-sp-ep2-dp2-mb1-z3", "ep2-dp2-mb2"];
    assert_equal(&subject(moe, attention), &layouts);
}

/// What the sums over the tensor axis are for.
#[test]
fn a_factor_whose_gradient_is_not_summed_is_found() {
    let unsummed = |entry: &mut ParameterEntry| {
        if entry.path.contains(".lora.") {
            entry.sum_over = entry.sum_over.without(Axis::Tensor);
        }
    };
    for (layout, target, factor) in [
        ("tp2-sp-mb2", "q_proj", "q_proj.a"),
        ("tp2-mb2", "down_proj", "down_proj.b"),
    ] {
        let faulty = Tampered::table(subject(model(), lora(&[target])), unsummed);
        let report = run(&faulty, &[layout]);
        assert!(!report.passes(), "{layout}");
        let text = report.to_string();
        assert!(text.contains(factor), "{layout}: {text}");
    }
}

/// The training state of a rank has the size of the adapters; of the frozen weights there are values, sharded by ZeRO-3.
#[test]
fn frozen_weights_have_no_gradient_and_no_state() {
    for (text, shards) in [("dp2-mb2", 1), ("dp2-mb2-z2", 1), ("dp2-mb2-z3", 2)] {
        let layout: Layout = text.parse().unwrap();
        let subject = ModelSubject {
            dtype: DType::F32,
            ..subject(model(), lora(&["q_proj", "o_proj"]))
        };
        World::threads(2)
            .unwrap()
            .run(|rank| {
                let groups = ParallelContext::new(&layout.parallel, &rank)?;
                let device = Device::flex();
                let config = DataParallelConfig {
                    precision: Precision::Bf16,
                    ..layout.data_parallel()
                };
                let model = subject.build(&groups, &device)?;
                let all = model.table.num_elements();
                let ddp = DistributedDataParallel::with(model, &groups, &config)?;
                // Two blocks, two targets, rank 3 beside 16 input and 16 output features.
                let trained = 2 * 2 * 3 * (16 + 16);
                assert_eq!(ddp.table().num_elements(), trained);
                assert!(
                    ddp.table()
                        .entries()
                        .iter()
                        .all(|entry| entry.path.contains(".lora."))
                );
                assert_eq!(ddp.layout().parameter_elements(), trained);
                let frozen = ddp.frozen_table().unwrap();
                assert_eq!(frozen.num_elements(), all - trained);
                let plan = ddp.memory_plan()?;
                let (trained, frozen) = (trained as u64, (all - trained) as u64);
                // Buckets are padded.
                let near = |bytes: u64, wanted: u64| {
                    assert!(
                        (wanted..wanted + 4096).contains(&bytes),
                        "{text}: {bytes}, not {wanted}"
                    )
                };
                near(plan.parameters * shards, 2 * (trained + frozen));
                assert!(
                    plan.gradients + plan.optimizer < 16 * trained + 4096,
                    "{text}: {plan}"
                );
                near(
                    ddp.usage().peak().parameters * shards,
                    2 * (trained + frozen),
                );
                Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
            })
            .unwrap();
    }
}

#[test]
fn a_target_that_the_model_does_not_have_is_refused() {
    let error = |config: TransformerConfig, targets: &[&str]| {
        let subject = subject(config, lora(targets));
        let layouts = [Layout::default()];
        let error = verify(&subject, &layouts, &VerifyOptions::default()).unwrap_err();
        error.to_string()
    };
    let gpt = TransformerConfig {
        activation: burn_megatron::nn::Activation::GeluTanh,
        ..model()
    };
    let missing = error(gpt, &["gate_proj", "q_proj"]);
    let wanted = "target_modules has gate_proj, which the model does not have as a layer that can have an adapter; of the \
                  targets it has q_proj";
    assert!(missing.contains(wanted), "{missing}");
    let moe = TransformerConfig {
        moe: Some(MoeConfig::default()),
        ..model()
    };
    let refused = error(moe, &["all-linear"]);
    let wanted = "lora.target_modules has gate_proj, and experts cannot have adapters";
    assert!(refused.contains(wanted), "{refused}");
}
