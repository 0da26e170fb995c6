//! Text generation with a KV cache, in any layout.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_megatron::choice::{KernelChoice, KernelChoices};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::data_parallel::ZeroStage;
use burn_megatron::generate::{FinishReason, GenerateConfig, GenerationOutput, Generator};
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::model::CachedAttention;
use burn_megatron::nn::{KvCache, ModelBuilder};
use burn_megatron::pipeline::split::LayerSplit;
use burn_megatron::tokenizer::Tokenizer;
use burn_megatron::train::{LanguageModel, ModelConfig, TrainConfig, Trainer};
use burn_megatron_models::{MoeConfig, Transformer, TransformerConfig};
use burn_megatron_tests::{recomputing::Recomputing, small_gpt, small_llama};
use burn_megatron_tests::{tolerance::assert_all_near, words};

type AnyError = Box<dyn std::error::Error + Send + Sync>;

const LAYERS: usize = 4;

/// A layout, and how many stages each rank of its pipeline has.
#[derive(Clone, Copy, Debug)]
struct TestLayout {
    tensor: usize,
    sequence_parallel: bool,
    pipeline: usize,
    stages: usize,
}

const ALONE: TestLayout = TestLayout {
    tensor: 1,
    sequence_parallel: false,
    pipeline: 1,
    stages: 1,
};

/// Tensor, sequence parallel, pipeline, stages of a rank.
const PLACES: [(usize, bool, usize, usize); 8] = [
    (1, false, 1, 1),
    (2, false, 1, 1),
    (4, false, 1, 1),
    (2, true, 1, 1),
    (4, true, 1, 1),
    (1, false, 2, 1),
    (1, false, 2, 2),
    (2, true, 2, 1),
];

fn layouts() -> impl Iterator<Item = TestLayout> {
    PLACES
        .into_iter()
        .map(|(tensor, sequence_parallel, pipeline, stages)| TestLayout {
            tensor,
            sequence_parallel,
            pipeline,
            stages,
        })
}

impl TestLayout {
    /// Runs `body` with each rank's part of the model, and the ranks of its stages.
    fn run<T: Send>(
        self,
        config: &TransformerConfig,
        choices: &KernelChoices,
        dtype: DType,
        body: impl Fn(&Transformer, &ParallelContext, Vec<usize>) -> Result<T, AnyError> + Sync,
    ) -> Result<Vec<T>, AnyError> {
        let layout = ParallelConfig::new()
            .with_tensor(self.tensor)
            .with_sequence_parallel(self.sequence_parallel)
            .with_pipeline(self.pipeline);
        let run = World::threads(self.tensor * self.pipeline)?.run(|rank| {
            let groups = ParallelContext::new(&layout, &rank)?;
            let scope =
                ModelBuilder::with(&groups, &Device::flex(), 3, dtype).with_kernels(choices)?;
            let stages = LayerSplit::Even.stages(LAYERS, self.pipeline * self.stages)?;
            let placement: Vec<_> = (0..stages.len()).map(|s| s % self.pipeline).collect();
            let own = stages.into_iter().enumerate();
            let own = own.filter(|(s, _)| placement[*s] == groups.pipeline().rank());
            let own: Vec<_> = own.collect();
            let model = config.init_stages(scope, &own)?;
            body(&model.module, &groups, placement)
        });
        Ok(run?)
    }
}

fn models() -> [(&'static str, TransformerConfig); 4] {
    let gpt = TransformerConfig {
        layers: LAYERS,
        ..small_gpt().config
    };
    let llama = TransformerConfig {
        layers: LAYERS,
        ..small_llama().config
    };
    let seen = TransformerConfig {
        window: Some(3),
        qk_norm: true,
        qkv_bias: Some(true),
        ..llama.clone()
    };
    let experts = TransformerConfig {
        moe: Some(MoeConfig {
            experts: 4,
            expert_width: Some(8),
            every: 2,
            shared_width: Some(12),
            ..MoeConfig::default()
        }),
        ..llama.clone()
    };
    [
        ("GPT", gpt),
        ("Llama", llama),
        ("Llama with a window", seen),
        ("Llama with experts", experts),
    ]
}

/// Token `i` of the text that is read.
fn token(i: usize) -> u32 {
    (i * i * 5 + 2 * i + 1) as u32 % 21
}

fn text(len: usize) -> Vec<u32> {
    (0..len).map(token).collect()
}

fn ids(tokens: &[u32]) -> Tensor<2, Int> {
    let ids: Vec<i32> = tokens.iter().map(|id| *id as i32).collect();
    Tensor::from_data(TensorData::new(ids, [1, tokens.len()]), &Device::flex())
}

/// The logits after 1, 2, ... tokens, on one rank and without a cache.
fn expected(config: &TransformerConfig, choices: &KernelChoices, dtype: DType) -> Vec<Vec<f64>> {
    let lengths = 1..config.context + 4;
    let rows = ALONE.run(config, choices, dtype, |model, _, _| {
        let after = |len: usize| {
            let tokens = text(len);
            let seen = &tokens[len.saturating_sub(config.context)..];
            let logits = model.logits(ids(seen)).narrow(1, seen.len() - 1, 1);
            logits.into_data().iter::<f64>().collect()
        };
        Ok(lengths.clone().map(after).collect())
    });
    rows.unwrap().swap_remove(0)
}

#[test]
fn logits_of_each_step_equal_those_of_the_full_text() {
    for (name, config) in models() {
        for choice in [KernelChoice::Auto, KernelChoice::Unfused] {
            for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-5)] {
                let choices = KernelChoices::all(choice);
                let expected = expected(&config, &choices, dtype);
                for layout in layouts() {
                    let what = format!("{name}, {choice:?}, {dtype:?}, {layout:?}");
                    let run = layout.run(&config, &choices, dtype, |model, groups, placement| {
                        let last = placement[placement.len() - 1] == groups.pipeline().rank();
                        let mut generator = Generator::new(model, groups, &Device::flex())
                            .with_placement(placement);
                        for (i, expected) in expected.iter().enumerate() {
                            // The prompt is of three tokens; the text outgrows the context.
                            let len = i + 1;
                            if len < 3 {
                                continue;
                            }
                            let logits = generator.logits_after(&text(len))?;
                            assert_eq!(logits.is_some(), last, "{what}");
                            if let Some(logits) = logits {
                                let what = format!("{what}, {len} tokens");
                                assert_all_near(&what, &logits, expected, tolerance);
                            }
                        }
                        Ok(())
                    });
                    run.unwrap();
                }
            }
        }
    }
}

/// A text with the same prefix, a shorter one, and one without a common prefix.
#[test]
fn the_cache_is_reused_for_texts_with_the_same_prefix() {
    let (_, config) = models()[1].clone();
    let choices = KernelChoices::default();
    let expected = expected(&config, &choices, DType::F64);
    for layout in layouts() {
        let run = layout.run(&config, &choices, DType::F64, |model, groups, placement| {
            let device = Device::flex();
            let mut generator =
                Generator::new(model, groups, &device).with_placement(placement.clone());
            let mut plain = Generator::new(model, groups, &device)
                .with_placement(placement.clone())
                .without_cache();
            let recomputing = Recomputing {
                inner: model.clone(),
            };
            let mut recomputing =
                Generator::new(&recomputing, groups, &device).with_placement(placement);
            let mut other = text(7);
            other[4] = 20 - other[4];
            let mut check = |tokens: &[u32], expected: Option<&[f64]>| {
                let found = generator.logits_after(tokens)?;
                let again = plain.logits_after(tokens)?;
                let recomputed = recomputing.logits_after(tokens)?;
                if let (Some(recomputed), Some(again)) = (&recomputed, &again) {
                    assert_all_near(&format!("{layout:?}"), recomputed, again, 1e-12);
                }
                if let (Some(found), Some(again)) = (&found, &again) {
                    assert_all_near(&format!("{layout:?}"), found, again, 1e-12);
                    if let Some(expected) = expected {
                        assert_all_near(&format!("{layout:?}"), found, expected, 1e-12);
                    }
                }
                Ok::<_, AnyError>(())
            };
            check(&text(6), Some(&expected[5]))?;
            check(&other, None)?;
            check(&text(3), Some(&expected[2]))?;
            check(&text(3), Some(&expected[2]))?;
            check(&text(8), Some(&expected[7]))
        });
        run.unwrap();
    }
}

/// Several sequences of one length in one cache.
#[test]
fn sequences_of_one_length_are_read_together() {
    for (name, config) in models() {
        let run = ALONE.run(
            &config,
            &KernelChoices::default(),
            DType::F64,
            |model, _, _| {
                let rows = [text(8), (0..8).map(|i| token(i + 4)).collect()];
                let whole: Vec<_> = rows.iter().map(|row| ids(row)).collect();
                let whole = Tensor::cat(whole, 0);
                let expected = model.logits(whole.clone());
                let mut cache = KvCache::new(LAYERS, config.context);
                for (first, len) in [(0, 3), (3, 1), (4, 1), (5, 3)] {
                    let piece = whole.clone().narrow(1, first, len);
                    let hidden = model.hidden_cached(0, None, piece, &mut cache);
                    cache.set_len(first + len);
                    let found: Vec<f64> = model.logits_of(hidden).into_data().iter().collect();
                    let expected = expected.clone().narrow(1, first, len);
                    let expected: Vec<f64> = expected.into_data().iter().collect();
                    assert_all_near(name, &found, &expected, 1e-12);
                }
                Ok(())
            },
        );
        run.unwrap();
    }
}

/// A model of bytes, so that there is text.
fn of_bytes() -> TransformerConfig {
    TransformerConfig {
        vocabulary: 256,
        context: 16,
        init_std: 0.5,
        ..models()[1].1.clone()
    }
}

fn written(config: &GenerateConfig, layout: TestLayout) -> Vec<(GenerationOutput, String)> {
    let run = layout.run(
        &of_bytes(),
        &KernelChoices::default(),
        DType::F32,
        |model, groups, placement| {
            let tokenizer = Tokenizer::bytes();
            let mut generator =
                Generator::new(model, groups, &Device::flex()).with_placement(placement);
            let mut seen = String::new();
            let prompt = config.prompt_tokens(&tokenizer)?;
            let written = generator.generate(&prompt, config, &tokenizer, &mut |text| {
                seen.push_str(text);
                Ok(())
            })?;
            Ok((written, seen))
        },
    );
    run.unwrap()
}

#[test]
fn every_layout_writes_the_same_text() {
    let config = GenerateConfig {
        prompt: "fn a() -> usize {".into(),
        tokens: 30,
        temperature: 0.9,
        top_k: Some(40),
        top_p: Some(0.95),
        seed: Some(7),
        ..GenerateConfig::default()
    };
    let alone = written(&config, ALONE).swap_remove(0).0;
    assert_eq!(
        (alone.tokens.len(), alone.finish_reason, alone.prompt),
        (30, FinishReason::Length, 17)
    );
    let tokens: Vec<u32> = config.prompt.bytes().map(u32::from).collect();
    let tokens = [tokens, alone.tokens.clone()].concat();
    let whole = Tokenizer::bytes().decode(&tokens).unwrap();
    assert_eq!(format!("{}{}", config.prompt, alone.text), whole);
    for layout in layouts() {
        for (other, seen) in written(&config, layout) {
            assert_eq!(other.tokens, alone.tokens, "{layout:?}");
            assert_eq!(other.text, alone.text, "{layout:?}");
            assert_eq!(seen, alone.text, "{layout:?}");
        }
    }
    let with_seed = |seed| {
        let config = GenerateConfig {
            seed,
            ..config.clone()
        };
        written(&config, ALONE).swap_remove(0).0.text
    };
    assert_ne!(with_seed(Some(8)), alone.text);
    assert_eq!(with_seed(None), with_seed(Some(0)));

    // It stops before two characters of it, which are two tokens or more.
    let stop: String = alone.text.chars().skip(9).take(2).collect();
    let begins = alone.text[..alone.text.find(&stop).unwrap()].to_string();
    let stopping = GenerateConfig {
        stop: vec!["not in it".into(), stop],
        ..config.clone()
    };
    for layout in [ALONE, layouts().last().unwrap()] {
        for (other, seen) in written(&stopping, layout) {
            assert_eq!(other.finish_reason, FinishReason::Stop);
            assert_eq!((&other.text, &seen), (&begins, &begins));
            assert!(other.tokens.len() < 30);
        }
    }
}

#[test]
fn invalid_settings_are_an_error_on_every_rank() {
    let (_, small) = models()[0].clone();
    for layout in [ALONE, layouts().last().unwrap()] {
        let run = layout.run(&small, &KernelChoices::default(), DType::F32, |model, groups, placement| {
            let tokenizer = Tokenizer::bytes();
            let mut generator =
                Generator::new(model, groups, &Device::flex()).with_placement(placement);
            let mut error = |prompt: &[u32], config: &GenerateConfig| {
                let written = generator.generate(prompt, config, &tokenizer, &mut |_| Ok(()));
                written.unwrap_err().to_string()
            };
            let config = GenerateConfig::default();
            assert!(error(&[], &config).starts_with("the prompt has no tokens"));
            assert_eq!(
                error(&[1, 21], &config),
                "the prompt has the token 21, but the vocabulary of the model has 21: the tokenizer \
                 belongs to another model"
            );
            let cold = GenerateConfig {
                temperature: -1.0,
                ..config
            };
            assert!(error(&[1], &cold).starts_with("invalid temperature = -1"));
            Ok(())
        });
        run.unwrap();
    }
}

/// With full sharding every rank of the data axis gathers, so all of them generate.
#[test]
fn a_trainer_writes_in_every_sharding() {
    let write = |data: usize, stage: ZeroStage| {
        let layout = ParallelConfig::new()
            .with_data(data)
            .with_tensor(2)
            .with_sequence_parallel(true);
        let run = World::threads(2 * data).unwrap().run(|rank| {
            let groups = ParallelContext::new(&layout, &rank)?;
            let scope = ModelBuilder::with(&groups, &Device::flex(), 3, DType::F32);
            let model = of_bytes().init_with(scope)?;
            let mut config = TrainConfig {
                micro_batch_size: 1,
                global_batch_size: 2,
                seed: 11,
                ..TrainConfig::default()
            };
            config.data_parallel.zero_stage = stage;
            let trainer = Trainer::new(model, &groups, &Device::flex(), &config)?;
            let config = GenerateConfig {
                tokens: 20,
                ..GenerateConfig::default()
            };
            Ok::<_, AnyError>(trainer.generate(&config, &Tokenizer::bytes())?.tokens)
        });
        run.unwrap()
    };
    let replicated = write(1, ZeroStage::Replicated);
    assert_eq!(replicated[0].len(), 20);
    for tokens in write(2, ZeroStage::Parameters) {
        assert_eq!(tokens, replicated[0]);
    }
}

/// A prompt is read in chunks, none of which may be lost.
#[test]
fn a_long_prompt_is_read_in_chunks() {
    let config = TransformerConfig {
        context: 1200,
        layers: LAYERS,
        ..small_gpt().config
    };
    let choices = KernelChoices::default();
    let tokens = text(1100);
    let whole = ALONE.run(&config, &choices, DType::F64, |model, _, _| {
        let logits = model.logits(ids(&tokens)).narrow(1, tokens.len() - 1, 1);
        Ok(logits.into_data().iter::<f64>().collect::<Vec<_>>())
    });
    let whole = whole.unwrap().swap_remove(0);
    for layout in [ALONE, layouts().last().unwrap()] {
        let run = layout.run(&config, &choices, DType::F64, |model, groups, placement| {
            let mut generator =
                Generator::new(model, groups, &Device::flex()).with_placement(placement);
            if let Some(logits) = generator.logits_after(&tokens)? {
                assert_all_near(&format!("{layout:?}"), &logits, &whole, 1e-12);
            }
            // A capacity of 1280 tokens does not fit, one of 1200 does.
            let width = config.hidden / config.heads;
            let heads = config.heads / layout.tensor;
            let layers = LAYERS / layout.pipeline;
            assert_eq!(
                generator.cache_bytes(),
                2 * layers * 1200 * heads * width * 8
            );
            Ok(())
        });
        run.unwrap();
    }
}

#[test]
fn a_token_that_ends_texts_ends_them() {
    let tokenizer = words();
    let (_, config) = models()[1].clone();
    let config = TransformerConfig {
        init_std: 0.3,
        ..config
    };
    for layout in [ALONE, layouts().last().unwrap()] {
        let run = layout.run(
            &config,
            &KernelChoices::default(),
            DType::F32,
            |model, groups, placement| {
                let mut generator =
                    Generator::new(model, groups, &Device::flex()).with_placement(placement);
                let config = GenerateConfig {
                    prompt: "w3 w4 w5".into(),
                    tokens: 400,
                    temperature: 1.0,
                    ..GenerateConfig::default()
                };
                let prompt = config.prompt_tokens(&tokenizer)?;
                assert_eq!(prompt, [3, 4, 5]);
                let mut write = |config: &GenerateConfig| {
                    generator.generate(&prompt, config, &tokenizer, &mut |_| Ok(()))
                };
                let written = write(&config)?;
                let (last, others) = written.tokens.split_last().unwrap();
                assert_eq!((written.finish_reason, *last), (FinishReason::Token, 0));
                assert!(others.len() > 3 && !others.contains(&0));
                let text: Vec<_> = others.iter().map(|token| format!(" w{token}")).collect();
                assert_eq!(written.text, text.concat());

                // From within one word into the next.
                let (second, third) = (&text[1], &text[2]);
                let stop = format!("{}{}", &second[2..], &third[..2]);
                let config = GenerateConfig {
                    stop: vec![stop.clone()],
                    ..config
                };
                let stopped = write(&config)?;
                assert_eq!(stopped.finish_reason, FinishReason::Stop);
                let begins = &written.text[..written.text.find(&stop).unwrap()];
                assert_eq!(stopped.text, begins);
                // Text held back for a possible stop sequence is returned at the end.
                let config = GenerateConfig {
                    stop: vec![format!("{} and more", &text[text.len() - 1])],
                    ..config
                };
                assert_eq!(write(&config)?.text, written.text);
                // An empty prompt is the token that ends the text before it.
                let config = GenerateConfig::default();
                let empty = GenerateConfig {
                    prompt: String::new(),
                    ..config
                };
                assert_eq!(empty.prompt_tokens(&tokenizer)?, [0]);
                Ok(())
            },
        );
        run.unwrap();
    }
}
