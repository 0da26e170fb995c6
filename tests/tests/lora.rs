//! Tests of adapters: every layout computes the same results as one rank, and frozen weights have no gradients and no
//! state.

use burn::tensor::{DType, Device};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::data_parallel::{DataParallelConfig, DistributedDataParallel, Precision};
use burn_megatron::mesh::Axis;
use burn_megatron::nn::ParameterEntry;
use burn_megatron::nn::lora::LoraConfig;
use burn_megatron::pipeline::split::LayerSplit;
use burn_megatron_models::{MoeConfig, TransformerConfig};
use burn_megatron_tests::tampered::Tampered;
use burn_megatron_train::TrainConfig;
use burn_megatron_verify::{Layout, ModelSubject, Subject, VerifyOptions, VerifyReport, verify};

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

/// Returns adapters with non-zero values in both factors, so that both have gradients from the first step on.
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
        train: TrainConfig {
            learning_rate: 0.01,
            ..VerifyOptions::default().train
        },
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
        // Two ranks have the same keys and values.
        "tp4-sp-mb4",
        "dp2-mb1-z1",
        "dp2-mb1-z2",
        "dp2-mb1-z3",
        "dp4-mb1-z3-hsdp2",
        "cp2-mb2",
        "pp2-mb2/1f1b",
        "pp2-mb1/zb-h1",
        "tp2-sp-dp2-mb1-z3",
        "tp2-sp-tpring-mb2",
        "tp4-sp-tpbulk2-mb4",
        "tp2-sp-pp2-dp2-mb1-z2/1f1b",
        "tp2-pp2-dp2-mb1-z3/1f1b",
    ];
    assert_equal(&subject(model(), lora(&["all-linear"])), &layouts);
}

/// The first stage has only the embedding, and the last stage has only the output. All of their weights are frozen.
#[test]
fn stages_without_adapters() {
    let layouts = ["pp3-mb1/1f1b", "pp3-dp2-mb1-z3/1f1b"].map(|text| {
        let mut layout: Layout = text.parse().unwrap();
        layout.parallel.split = LayerSplit::Layout("E|tt|L".into());
        layout
    });
    let options = VerifyOptions {
        steps: 3,
        train: TrainConfig {
            learning_rate: 0.01,
            ..VerifyOptions::default().train
        },
        ..VerifyOptions::default()
    };
    let subject = subject(model(), lora(&["all-linear"]));
    let report = verify(&subject, &layouts, &options).unwrap();
    assert!(report.passes(), "{report}");
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

/// A missing sum over the tensor axis is found by the gradient of the factor.
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

/// The training state of a rank has the size of the adapters. ZeRO-3 shards the values of the frozen weights.
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
                // Two blocks with two targets each. The adapters have rank 3, with 16 input and 16 output features.
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
    let wanted = "target_modules has gate_proj, but the model has no such layer that can have an adapter; it has \
                  q_proj";
    assert!(missing.contains(wanted), "{missing}");
    let moe = TransformerConfig {
        moe: Some(MoeConfig::default()),
        ..model()
    };
    let refused = error(moe, &["all-linear"]);
    let wanted = "lora.target_modules has gate_proj, and experts cannot have adapters";
    assert!(refused.contains(wanted), "{refused}");
}

/// An adapter of `peft` for a model of `transformers`, with results from its `make.py`.
mod peer {
    use std::fs;
    use std::path::PathBuf;

    use burn::tensor::{Int, Tensor, TensorData};
    use burn_megatron::checkpoint::{LoadTolerance, TensorSource};
    use burn_megatron::model::{LanguageModel, ModelConfig};
    use burn_megatron::nn::ModelBuilder;
    use burn_megatron::pipeline::engine::{ForwardOptions, forward_only};
    use burn_megatron_models::hf::peft::{
        MergedAdapters, PeftAdapter, WithAdapters, adapted_layers, export_adapter,
    };
    use burn_megatron_models::hf::{ExportOptions, HfFolder};
    use burn_megatron_train::Trainer;
    use safetensors::SafeTensors;

    use super::*;
    use crate::hf::{AnyError, Losses, SEQ, Sequences, apart, config};

    fn fixtures() -> PathBuf {
        concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/fixtures").into()
    }

    fn base() -> HfFolder {
        HfFolder::open(fixtures().join("hf/llama3")).unwrap()
    }

    fn adapter() -> PeftAdapter {
        let config = base().config().clone();
        PeftAdapter::open(&fixtures().join("peft"), (config.family, &config.model)).unwrap()
    }

    /// The expected values.
    struct Expected(Vec<u8>);

    impl Expected {
        fn open() -> Self {
            Self(fs::read(fixtures().join("peft/expected.safetensors")).unwrap())
        }

        fn values<const N: usize, T>(&self, name: &str, read: fn([u8; N]) -> T) -> Vec<T> {
            let file = SafeTensors::deserialize(&self.0).unwrap();
            let bytes = file.tensor(name).unwrap().data();
            bytes.as_chunks().0.iter().copied().map(read).collect()
        }

        fn floats(&self, name: &str) -> Vec<f32> {
            self.values(name, f32::from_le_bytes)
        }
    }

    /// The logits of whole sequences, the losses, and the factors after the last step by path.
    type Results = (
        Option<Vec<f32>>,
        Vec<f64>,
        Vec<(String, [usize; 2], Vec<f32>)>,
    );

    fn run(layout: &str) -> Vec<Results> {
        let layout = layout.parse::<Layout>().unwrap().parallel;
        let ranks = layout.world_size().unwrap();
        let run = World::threads(ranks)
            .unwrap()
            .run(|rank| -> Result<Results, AnyError> {
                let groups = ParallelContext::new(&layout, &rank)?;
                let (device, mut config, expected) = (Device::flex(), config(), Expected::open());
                config.data_parallel.zero_stage = layout.zero_stage;
                let scope =
                    ModelBuilder::new(&groups, &device).with_lora(Some(adapter().lora()))?;
                let model = base().config().model.init_with(scope)?;
                let mut trainer = Trainer::new(model, &groups, &device, &config)?;
                let source = WithAdapters {
                    base: Box::new(base()),
                    adapters: Box::new(adapter()),
                };
                trainer.load_weights(&source, LoadTolerance::default())?;
                let logits = logits(trainer.model().module(), &groups, &expected)?;
                let mut losses = Losses::default();
                let batches = expected.values("batches", i32::from_le_bytes);
                trainer.fit(&Sequences::new(&batches), &mut losses)?;
                let ddp = trainer.model();
                let factors = ddp.table().entries().iter().zip(ddp.parameters());
                let factors = factors.map(|(entry, value)| {
                    let shape = [entry.shape[0], entry.shape[1]];
                    (
                        entry.path.clone(),
                        shape,
                        value.into_data().iter::<f32>().collect(),
                    )
                });
                Ok((logits, losses.own, factors.collect()))
            });
        run.unwrap()
    }

    fn logits(
        module: &impl LanguageModel,
        groups: &ParallelContext,
        expected: &Expected,
    ) -> Result<Option<Vec<f32>>, AnyError> {
        let device = Device::flex();
        let tokens = TensorData::new(expected.values("tokens", i32::from_le_bytes), [2, SEQ]);
        let tokens = Tensor::<2, Int>::from_data(tokens, &device);
        let placement: Vec<_> = (0..groups.pipeline().size()).collect();
        let run = |stage, input| module.hidden(stage, input, tokens.clone().into());
        let options = ForwardOptions::default();
        let hidden = forward_only(&placement, groups.pipeline(), &device, options, run)?;
        Ok(hidden.map(|hidden| module.logits_of(hidden).into_data().iter::<f32>().collect()))
    }

    /// Returns the name of a factor in the files of `peft`.
    fn name(path: &str) -> String {
        let parts: Vec<_> = path.split('.').collect();
        let [_, block, module, _, _, target, factor] = parts[..] else {
            panic!("{path}")
        };
        let module = if module == "attention" {
            "self_attn"
        } else {
            module
        };
        let factor = factor.to_uppercase();
        format!("base_model.model.model.layers.{block}.{module}.{target}.lora_{factor}.weight")
    }

    #[test]
    fn an_adapter_of_peft_computes_and_trains_as_there() {
        let expected = Expected::open();
        let (logits, losses) = (
            expected.floats("logits"),
            expected.values("losses", f64::from_le_bytes),
        );
        for layout in ["tp1", "tp2-sp", "tp2-pp2/1f1b", "dp2-z3"] {
            let results = run(layout);
            assert!(results.iter().any(|(logits, ..)| logits.is_some()));
            for (found, found_losses, factors) in results {
                if let Some(found) = found {
                    let apart = apart(&found, &logits);
                    println!("{layout}: logits {apart:.1e} apart");
                    assert!(apart < 1e-5, "{layout}: logits {apart} apart");
                }
                let distance = apart(&found_losses, &losses);
                println!("{layout}: losses {distance:.1e} apart");
                assert!(distance < 1e-5, "{layout}: losses {distance} apart");
                // Layouts with whole factors on a rank.
                let is_whole = layout == "tp1" || layout == "dp2-z3";
                assert_eq!(factors.len(), if layout.contains("pp2") { 10 } else { 20 });
                for (path, [rows, columns], values) in factors.iter().filter(|_| is_whole) {
                    let wanted = expected.floats(&format!("trained.{}", name(path)));
                    let turned: Vec<f32> = (0..columns * rows)
                        .map(|i| values[i % rows * columns + i / rows])
                        .collect();
                    let apart = apart(&turned, &wanted);
                    assert!(apart < 1e-4, "{layout}: {path} is {apart} apart");
                }
            }
        }
    }

    /// An imported adapter that is exported again has the bits and the names of the file from `peft`.
    #[test]
    fn an_exported_adapter_is_that_of_peft() {
        let (adapter, config) = (adapter(), base().config().clone());
        let layers = adapted_layers(&config.model, adapter.lora()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let to = folder.path().join("adapter");
        let of = (config.family, &config.model);
        let options = ExportOptions::default();
        export_adapter(&adapter, of, &layers, &to, &options, &mut |_| {}).unwrap();
        let read = |path: PathBuf| fs::read(path.join("adapter_model.safetensors")).unwrap();
        let (own, theirs) = (read(to.clone()), read(fixtures().join("peft")));
        let [own, theirs] = [&own, &theirs].map(|bytes| SafeTensors::deserialize(bytes).unwrap());
        assert_eq!(own.len(), theirs.len());
        for (name, tensor) in theirs.tensors() {
            let found = own.tensor(&name).unwrap();
            assert_eq!(
                (found.shape(), found.data()),
                (tensor.shape(), tensor.data()),
                "{name}"
            );
        }
        let again = PeftAdapter::open(&to, of).unwrap();
        assert_eq!(again.lora(), adapter.lora());
    }

    #[test]
    fn merged_weights_compute_what_the_adapter_does() {
        let config = base().config().clone();
        let layers = adapted_layers(&config.model, adapter().lora()).unwrap();
        let merged = MergedAdapters::new(Box::new(base()), Box::new(adapter()), layers).unwrap();
        let groups = ParallelContext::single();
        let scope = ModelBuilder::new(&groups, &Device::flex());
        let model = config.model.init_with(scope).unwrap();
        let mut ddp = DistributedDataParallel::new(model, &groups).unwrap();
        let tolerance = LoadTolerance::default();
        burn_megatron::checkpoint::load_weights(&mut ddp, &merged, tolerance).unwrap();
        let expected = Expected::open();
        let logits = logits(ddp.module(), &groups, &expected).unwrap().unwrap();
        let apart = apart(&logits, &expected.floats("logits"));
        assert!(apart < 1e-5, "{apart}");
        // A slice of a fused weight that spans two sections.
        let key = "model/blocks.1.attention.qkv.weight";
        let shape = merged.tensor(key).unwrap().shape;
        let whole = burn_megatron::checkpoint::TensorSlice::whole(&shape);
        let slice = burn_megatron::checkpoint::TensorSlice {
            offset: vec![3, 20],
            shape: vec![2, 30],
        };
        let whole = merged.read(key, &whole).unwrap();
        let columns = shape[1];
        let rows =
            (3..5).flat_map(|row| &whole[4 * (row * columns + 20)..4 * (row * columns + 50)]);
        let part: Vec<u8> = rows.copied().collect();
        let values = |bytes: &[u8]| -> Vec<f32> {
            bytes
                .as_chunks()
                .0
                .iter()
                .map(|bytes| f32::from_le_bytes(*bytes))
                .collect()
        };
        let found = merged.read(key, &slice).unwrap();
        assert!(super::super::hf::apart(&values(&found), &values(&part)) < 1e-6);
    }
}
