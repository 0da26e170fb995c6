//! Tests of batches. Each text equals the text of its prompt alone, bit for bit, and has the log-probabilities of the
//! training forward pass.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::kernel_selection::KernelChoices;
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::model::{LanguageModel, ModelConfig};
use burn_megatron::nn::ModelBuilder;
use burn_megatron::nn::moe::RouterChoice;
use burn_megatron_data::tokenizer::Tokenizer;
use burn_megatron_generate::{FinishReason, GenerateConfig, GenerationOutput, Generator, Written};
use burn_megatron_models::{MoeConfig, TransformerConfig};
use burn_megatron_tests::recomputing::Recomputing;
use burn_megatron_tests::small_llama;
use burn_megatron_tests::tolerance::assert_all_near;

use super::{ALONE, AnyError, TestLayout, layouts, models};

/// Returns models of bytes with fused attention and distinct logits.
fn of_bytes() -> impl Iterator<Item = (&'static str, TransformerConfig)> {
    models().into_iter().map(|(name, config)| {
        let config = TransformerConfig {
            vocabulary: 256,
            context: 40,
            init_std: 0.3,
            attention_dropout: 0.0,
            attention_soft_cap: None,
            ..config
        };
        (name, config)
    })
}

fn settings() -> GenerateConfig {
    GenerateConfig {
        tokens: 20,
        temperature: 0.9,
        top_p: Some(0.97),
        seed: Some(5),
        logprobs: true,
        ..GenerateConfig::default()
    }
}

/// Returns prompts of several lengths. The longest prompt exceeds the context.
fn prompts() -> Vec<Vec<u32>> {
    let byte = |i: usize, by: usize| ((i * i * 7 + by * 31 + 5) % 256) as u32;
    [3, 1, 17, 26, 9]
        .map(|len| (0..len).map(|i| byte(i, len)).collect())
        .to_vec()
}

/// Returns the generated texts on every rank, in batches of each size.
fn written(
    config: &TransformerConfig,
    settings: &GenerateConfig,
    layout: TestLayout,
    batch_sizes: &[usize],
) -> Vec<Vec<Vec<GenerationOutput>>> {
    let choices = KernelChoices::default();
    let run = layout.run(config, &choices, DType::F32, |model, groups, placement| {
        let write = |batch_size: &usize| {
            let mut generator =
                Generator::new(model, groups, &Device::flex()).with_placement(placement.clone());
            let texts = generator.generate_batch(
                &prompts(),
                *batch_size,
                settings,
                &Tokenizer::bytes(),
                &mut |_, _| Ok(()),
            )?;
            Ok::<_, AnyError>(texts)
        };
        batch_sizes.iter().map(write).collect()
    });
    run.unwrap()
}

pub(super) fn assert_same(what: &str, found: &[GenerationOutput], expected: &[GenerationOutput]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let bits = |text: &GenerationOutput| -> Vec<u64> {
            text.logprobs.iter().map(|value| value.to_bits()).collect()
        };
        assert_eq!(found.tokens, expected.tokens, "{what}, prompt {i}");
        assert_eq!(found.text, expected.text, "{what}, prompt {i}");
        assert_eq!(
            found.finish_reason, expected.finish_reason,
            "{what}, prompt {i}"
        );
        assert_eq!(bits(found), bits(expected), "{what}, prompt {i}");
        assert_eq!(
            found.logprobs.len(),
            found.tokens.len(),
            "{what}, prompt {i}"
        );
    }
}

#[test]
fn a_text_of_a_batch_is_that_of_its_prompt_alone() {
    for (number, (name, config)) in of_bytes().enumerate() {
        let first = written(&config, &settings(), ALONE, &[1])
            .swap_remove(0)
            .swap_remove(0);
        // Each layout is tested with some of the models.
        let layouts = layouts().enumerate();
        let own = layouts.filter(|(layout, _)| (layout + number).is_multiple_of(4));
        for (_, layout) in own {
            for ranks in written(&config, &settings(), layout, &[1, 2, 5]) {
                let [alone, two, five] = &ranks[..] else {
                    unreachable!("three batch sizes")
                };
                let what = format!("{name}, {layout:?}");
                assert_same(&what, two, alone);
                assert_same(&what, five, alone);
                for (text, first) in alone.iter().zip(&first) {
                    assert_eq!(text.tokens, first.tokens, "{what}");
                    assert_all_near(&what, &text.logprobs, &first.logprobs, 1e-5);
                }
            }
        }
    }
}

/// Experts that are selected in turn depend only on the position of a token in its text, also in training.
#[test]
fn experts_in_turn_do_not_depend_on_the_batch_or_the_layout() {
    let moe = MoeConfig {
        experts: 4,
        expert_width: Some(16),
        choice: RouterChoice::RoundRobin,
        ..MoeConfig::default()
    };
    let config = TransformerConfig {
        vocabulary: 256,
        context: 40,
        init_std: 0.3,
        moe: Some(moe),
        ..small_llama().config
    };
    let settings = GenerateConfig {
        tokens: 6,
        ..settings()
    };
    let layout = |tensor, sequence_parallel, context, pipeline| TestLayout {
        tensor,
        sequence_parallel,
        context,
        pipeline,
        stages: 1,
    };
    let first = written(&config, &settings, ALONE, &[1]).swap_remove(0);
    let layouts = [
        ALONE,
        layout(2, false, 1, 1),
        layout(2, true, 1, 1),
        layout(1, false, 2, 1),
        layout(1, false, 1, 2),
    ];
    for layout in layouts {
        let ranks = written(&config, &settings, layout, &[1, 3]);
        for text in ranks
            .iter()
            .flatten()
            .flat_map(|texts| texts.iter().zip(&first[0]))
        {
            let what = format!("{layout:?}");
            assert_eq!(text.0.tokens, text.1.tokens, "{what}");
            assert_all_near(&what, &text.0.logprobs, &text.1.logprobs, 1e-5);
        }
    }
}

/// Tests the setting `num_return_sequences` of `transformers`.
#[test]
fn samples_of_a_prompt_depend_on_the_seed_alone() {
    let (_, config) = of_bytes().next().unwrap();
    let of = |samples, seed, layout, batch_sizes: &[usize]| {
        let settings = GenerateConfig {
            samples,
            tokens: 8,
            seed: Some(seed),
            ..settings()
        };
        written(&config, &settings, layout, batch_sizes).swap_remove(0)
    };
    let three = of(3, 5, ALONE, &[1]).swap_remove(0);
    let two = TestLayout { tensor: 2, ..ALONE };
    for layout in [ALONE, two] {
        let found = of(3, 5, layout, &[1, 2, 7]);
        assert_same("batch of 2", &found[1], &found[0]);
        assert_same("batch of 7", &found[2], &found[0]);
        for (text, first) in found[0].iter().zip(&three) {
            assert_eq!(text.tokens, first.tokens, "{layout:?}");
        }
    }
    // Samples are listed prompt by prompt. A sample does not depend on the number of samples.
    let one = of(1, 5, ALONE, &[2]).swap_remove(0);
    let five = of(5, 5, ALONE, &[2]).swap_remove(0);
    assert_eq!([one.len(), three.len(), five.len()], [5, 15, 25]);
    for prompt in 0..5 {
        let three = &three[3 * prompt..][..3];
        assert_same("5 samples", three, &five[5 * prompt..][..3]);
        assert_same("1 sample", &three[..1], &one[prompt..][..1]);
        assert_ne!(three[0].tokens, three[1].tokens, "prompt {prompt}");
        assert_ne!(three[1].tokens, three[2].tokens, "prompt {prompt}");
    }
    let other = of(3, 6, ALONE, &[1]).swap_remove(0);
    assert_ne!(other[1].tokens, three[1].tokens);
}

/// Texts that end leave the batch, and other texts take their place.
#[test]
fn texts_of_a_batch_stop_by_themselves() {
    let (_, config) = of_bytes().nth(1).unwrap();
    let all = written(&config, &settings(), ALONE, &[1])
        .swap_remove(0)
        .swap_remove(0);
    // Two characters from the middle of some texts. The other texts hardly contain them.
    let pair = |i: usize| {
        let characters: Vec<char> = all[i].text.chars().collect();
        let mut pairs = characters.windows(2).skip(2 * i);
        let pair = pairs.find(|pair| pair.iter().all(char::is_ascii));
        String::from_iter(pair.expect("a text with two letters"))
    };
    let stops = [1, 2, 4].map(pair).to_vec();
    let settings = GenerateConfig {
        stop: stops,
        ..settings()
    };
    for layout in [ALONE, layouts().last().unwrap()] {
        for ranks in written(&config, &settings, layout, &[1, 2, 3]) {
            assert_same("stops", &ranks[1], &ranks[0]);
            assert_same("stops", &ranks[2], &ranks[0]);
            let stopped = |text: &&GenerationOutput| text.finish_reason == FinishReason::Stop;
            assert!((2..5).contains(&ranks[0].iter().filter(stopped).count()));
        }
    }
}

fn row(tokens: &[u32]) -> Tensor<2, Int> {
    let ids: Vec<i32> = tokens.iter().map(|id| *id as i32).collect();
    Tensor::from_data(TensorData::new(ids, [1, tokens.len()]), &Device::flex())
}

/// Compares with the loss of training on the same tokens.
#[test]
fn log_probabilities_are_those_of_the_training_forward() {
    let tensor = |tensor, sequence_parallel| TestLayout {
        tensor,
        sequence_parallel,
        ..ALONE
    };
    let settings = GenerateConfig {
        tokens: 13,
        ..settings()
    };
    for (name, mut config) in of_bytes() {
        if matches!(name, "Llama" | "DeepSeek") {
            // With LongRoPE, the length of a training row selects the factors of all of its tokens.
            config.positions = small_llama().config.positions;
        }
        for dtype in [DType::F32, DType::F64] {
            for layout in [ALONE, tensor(2, false), tensor(2, true)] {
                let what = format!("{name}, {dtype:?}, {layout:?}");
                let choices = KernelChoices::default();
                let run = layout.run(&config, &choices, dtype, |model, groups, _| {
                    let device = Device::flex();
                    let recomputing = Recomputing {
                        inner: model.clone(),
                    };
                    let mut cached = Generator::new(model, groups, &device);
                    let mut plain = Generator::new(&recomputing, groups, &device);
                    let (bytes, prompts) = (Tokenizer::bytes(), prompts());
                    let on_text = &mut |_: usize, _: Written<'_>| Ok(());
                    let texts = cached.generate_batch(&prompts, 5, &settings, &bytes, on_text)?;
                    let others = plain.generate_batch(&prompts, 5, &settings, &bytes, on_text)?;
                    for ((text, other), prompt) in texts.iter().zip(&others).zip(&prompts) {
                        let all = [&prompt[..], &text.tokens].concat();
                        let multiple = model.sequence_multiple();
                        // Padding is behind the tokens that are compared.
                        let padded = |tokens: &[u32]| {
                            let mut tokens = tokens.to_vec();
                            tokens.resize(tokens.len().next_multiple_of(multiple), 0);
                            row(&tokens)
                        };
                        let losses = model.losses(padded(&all[..all.len() - 1]), padded(&all[1..]));
                        let losses: Vec<f64> = losses.into_data().iter().collect();
                        let new = &losses[prompt.len() - 1..][..text.tokens.len()];
                        let expected: Vec<f64> = new.iter().map(|loss| -loss).collect();
                        assert_eq!(other.tokens, text.tokens, "{what}");
                        assert_eq!(other.logprobs, expected, "{what}, without a cache");
                        if name == "DeepSeek" {
                            // A cache of latents multiplies in a different order.
                            assert_all_near(&what, &text.logprobs, &expected, 1e-5);
                        } else {
                            assert_eq!(text.logprobs, expected, "{what}");
                        }
                    }
                    Ok(())
                });
                run.unwrap();
            }
        }
    }
}

/// The cache of a layer with a window is limited to the window and some tokens before it. The results are the same.
#[test]
fn a_window_bounds_the_cache() {
    let (_, config) = of_bytes().nth(3).unwrap();
    let config = TransformerConfig {
        context: 700,
        layer_windows: vec![100, 0, 100, 0],
        ..config
    };
    let settings = GenerateConfig {
        tokens: 140,
        ..settings()
    };
    let prompt: Vec<u32> = (0..300).map(|i| (i * i * 3 + 7) % 256).collect();
    let contexts = [1, 2].map(|context| TestLayout { context, ..ALONE });
    let texts = contexts.map(|layout| {
        let choices = KernelChoices::default();
        let run = layout.run(&config, &choices, DType::F32, |model, groups, _| {
            let mut generator = Generator::new(model, groups, &Device::flex());
            let text =
                generator.generate(&prompt, &settings, &Tokenizer::bytes(), &mut |_| Ok(()))?;
            // There are 99 tokens before the new token: two steps of 64 and two more. The other layers have two steps
            // of 256.
            let tokens = match layout.context {
                1 => 2 * 256 + 2 * 512,
                _ => 2 * (64 + 2 * 64) + 2 * 256,
            };
            let heads = config.groups.unwrap_or(config.heads);
            let width = config.head_width.unwrap_or(config.hidden / config.heads);
            assert_eq!(generator.cache_bytes(), 2 * tokens * heads * width * 4);
            if layout.context == 1 {
                let all = [&prompt[..], &text.tokens].concat();
                let losses = model.losses(row(&all[..all.len() - 1]), row(&all[1..]));
                let losses: Vec<f64> = losses.into_data().iter().collect();
                let new = &losses[prompt.len() - 1..];
                let expected: Vec<f64> = new.iter().map(|loss| -loss).collect();
                assert_eq!(text.logprobs, expected);
            }
            // Tokens that the cache has dropped are read again.
            let before = &prompt[..250];
            let found = generator.logits_after(before)?.unwrap();
            let mut fresh = Generator::new(model, groups, &Device::flex());
            assert_eq!(found, fresh.logits_after(before)?.unwrap());
            Ok(text.tokens)
        });
        run.unwrap()
    });
    for tokens in texts.iter().flatten() {
        assert_eq!(tokens, &texts[0][0]);
    }
}

/// Experts are on other ranks, and these ranks have the same tokens. The text equals the text of one rank.
#[test]
fn experts_are_split_over_ranks() {
    let (_, config) = of_bytes().nth(4).unwrap();
    let expected = written(&config, &settings(), ALONE, &[1])
        .swap_remove(0)
        .swap_remove(0);
    for layout in [
        ParallelConfig::new()
            .with_tensor(2)
            .with_sequence_parallel(true),
        ParallelConfig::new().with_context(2),
    ] {
        let layout = layout.with_expert(2).with_expert_tensor(1);
        let run = World::threads(2).unwrap().run(|rank| {
            let groups = ParallelContext::new(&layout, &rank)?;
            let scope = ModelBuilder::with(&groups, &Device::flex(), 3, DType::F32);
            let model = config.init_with(scope)?.module;
            let write = |batch_size| {
                let mut generator = Generator::new(&model, &groups, &Device::flex());
                let bytes = Tokenizer::bytes();
                let on_text = &mut |_: usize, _: Written<'_>| Ok(());
                generator.generate_batch(&prompts(), batch_size, &settings(), &bytes, on_text)
            };
            Ok::<_, AnyError>([write(1)?, write(5)?])
        });
        for [alone, five] in run.unwrap() {
            assert_same("experts", &five, &alone);
            for (text, expected) in alone.iter().zip(&expected) {
                assert_eq!(text.tokens, expected.tokens, "{layout:?}");
            }
        }
    }
}
