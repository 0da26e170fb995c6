//! Tests of generated texts and their ends.

use burn::tensor::{DType, Device};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::data_parallel::ZeroStage;
use burn_megatron::kernel_selection::KernelChoices;
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::model::ModelConfig;
use burn_megatron::nn::ModelBuilder;
use burn_megatron_data::tokenizer::Tokenizer;
use burn_megatron_generate::{FinishReason, GenerateConfig, GenerationOutput, Generator};
use burn_megatron_models::TransformerConfig;
use burn_megatron_tests::words;
use burn_megatron_train::{TrainConfig, Trainer};

use super::{ALONE, AnyError, TestLayout, layouts, models};

/// Returns a model of bytes, so that it generates text.
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

    // Generation stops before these two characters, which are at least two tokens.
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
                "the prompt has the token 21, but the vocabulary of the model has 21 tokens: the tokenizer \
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

/// With full sharding, every rank of the data axis gathers parameters, so all of them generate.
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
            Ok::<_, AnyError>(
                trainer
                    .generate(&config, &Tokenizer::bytes(), &mut |_| Ok(()))?
                    .tokens,
            )
        });
        run.unwrap()
    };
    let replicated = write(1, ZeroStage::Replicated);
    assert_eq!(replicated[0].len(), 20);
    for tokens in write(2, ZeroStage::Parameters) {
        assert_eq!(tokens, replicated[0]);
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

                // The stop sequence spans two words.
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
                // Text that is held back for a possible stop sequence is returned at the end.
                let config = GenerateConfig {
                    stop: vec![format!("{} and more", &text[text.len() - 1])],
                    ..config
                };
                assert_eq!(write(&config)?.text, written.text);
                // An empty prompt is replaced by the token that ends the text before it.
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
