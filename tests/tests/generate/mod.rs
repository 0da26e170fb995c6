//! Tests of text generation with a KV cache, in any layout.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::kernel_selection::{KernelChoice, KernelChoices};
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::model::CachedAttention;
use burn_megatron::model::{LanguageModel, ModelConfig};
use burn_megatron::nn::{KvCache, ModelBuilder, SequencePart};
use burn_megatron::pipeline::split::LayerSplit;
use burn_megatron_generate::Generator;
use burn_megatron_models::{MlaConfig, MoeConfig, Transformer, TransformerConfig};
use burn_megatron_tests::tolerance::assert_all_near;
use burn_megatron_tests::{
    long_rope, recomputing::Recomputing, small_gemma, small_gpt, small_gpt_oss, small_llama,
};

mod batch;
mod speculative;
mod written;

type AnyError = Box<dyn std::error::Error + Send + Sync>;

const LAYERS: usize = 4;

/// A layout, and the number of stages per pipeline rank.
#[derive(Clone, Copy, Debug)]
struct TestLayout {
    tensor: usize,
    sequence_parallel: bool,
    context: usize,
    pipeline: usize,
    stages: usize,
}

const ALONE: TestLayout = TestLayout {
    tensor: 1,
    sequence_parallel: false,
    context: 1,
    pipeline: 1,
    stages: 1,
};

/// Tensor, sequence parallel, context, pipeline, stages per rank.
const PLACES: [(usize, bool, usize, usize, usize); 12] = [
    (1, false, 1, 1, 1),
    (2, false, 1, 1, 1),
    (4, false, 1, 1, 1),
    (2, true, 1, 1, 1),
    (4, true, 1, 1, 1),
    (1, false, 1, 2, 1),
    (1, false, 1, 2, 2),
    (1, false, 2, 1, 1),
    (1, false, 4, 1, 1),
    (2, true, 2, 1, 1),
    (1, false, 2, 2, 2),
    (2, true, 1, 2, 1),
];

fn layouts() -> impl Iterator<Item = TestLayout> {
    PLACES.into_iter().map(
        |(tensor, sequence_parallel, context, pipeline, stages)| TestLayout {
            tensor,
            sequence_parallel,
            context,
            pipeline,
            stages,
        },
    )
}

impl TestLayout {
    /// Runs `body` with each rank's part of the model, and with the ranks of its stages.
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
            .with_context(self.context)
            .with_pipeline(self.pipeline);
        let run = World::threads(self.tensor * self.context * self.pipeline)?.run(|rank| {
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

/// Returns the configuration with `LAYERS` layers, and a window in every second layer.
fn with_layers(config: TransformerConfig) -> TransformerConfig {
    TransformerConfig {
        layers: LAYERS,
        layer_windows: (0..LAYERS).map(|layer| [3, 0][layer % 2]).collect(),
        ..config
    }
}

fn models() -> [(&'static str, TransformerConfig); 5] {
    let gpt = TransformerConfig {
        layers: LAYERS,
        ..small_gpt().config
    };
    // Texts grow beyond the original context. Longer texts use different positions.
    let llama = TransformerConfig {
        layers: LAYERS,
        positions: long_rope(4, 5),
        ..small_llama().config
    };
    let gemma = TransformerConfig {
        qkv_bias: Some(true),
        ..with_layers(small_gemma().config)
    };
    let gpt_oss = with_layers(small_gpt_oss().config);
    let gpt_oss = TransformerConfig {
        moe: gpt_oss.moe.map(|moe| MoeConfig {
            every: 2,
            shared_width: Some(12),
            ..moe
        }),
        ..gpt_oss
    };
    let deepseek = TransformerConfig {
        groups: None,
        mla: Some(MlaConfig {
            q_rank: Some(6),
            kv_rank: 5,
            nope_width: 3,
            rope_width: 4,
            value_width: 2,
            norm_epsilon: 1e-6,
        }),
        ..llama.clone()
    };
    [
        ("GPT", gpt),
        ("Llama", llama),
        ("DeepSeek", deepseek),
        ("Gemma", gemma),
        ("gpt-oss", gpt_oss),
    ]
}

/// Returns token `i` of the text that is read.
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

/// Returns the logits after 1, 2, ... tokens, on one rank and without a cache.
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
                            // The prompt has three tokens. The text exceeds the context.
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

/// Reads a text with the same prefix, a shorter text, and a text without a common prefix.
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

/// Reads sequences of several lengths with one cache. Sequences join and end, and there is padding.
#[test]
fn sequences_of_any_lengths_are_read_together() {
    for (name, config) in models() {
        let run = ALONE.run(
            &config,
            &KernelChoices::default(),
            DType::F64,
            |model, _, _| {
                let rows: [Vec<u32>; 3] =
                    [0, 4, 9].map(|by| (0..8).map(|i| token(i + by)).collect());
                let expected = rows.each_ref().map(|row| model.logits(ids(row)));
                let mut cache = KvCache::with_windows(model.attention_windows(), config.context);
                // The first new token of each sequence, and the number of new tokens.
                for parts in [
                    vec![(0, 0, 3)],
                    vec![(0, 3, 1), (2, 0, 5)],
                    vec![(1, 0, 2), (0, 4, 1), (2, 5, 1)],
                    vec![(2, 6, 2), (1, 2, 6)],
                    vec![(0, 5, 3)],
                ] {
                    let mut new = vec![];
                    for (row, first, count) in &parts {
                        assert_eq!(cache.begin(*row, *first, 8), *first);
                        new.extend(&rows[*row][*first..first + count]);
                    }
                    new.push(0);
                    let reads = parts.iter().map(|(sequence, _, count)| SequencePart {
                        sequence: *sequence,
                        count: *count,
                    });
                    cache.read(&reads.collect::<Vec<_>>(), new.len());
                    let hidden = model.hidden_cached(0, None, ids(&new), &mut cache);
                    let logits = model.logits_of(hidden);
                    let mut at = 0;
                    for (row, first, count) in parts {
                        cache.set_len(row, first + count);
                        let found = logits.clone().narrow(1, at, count).into_data();
                        let found: Vec<f64> = found.iter().collect();
                        let expected = expected[row].clone().narrow(1, first, count);
                        let expected: Vec<f64> = expected.into_data().iter().collect();
                        assert_all_near(name, &found, &expected, 1e-12);
                        at += count;
                    }
                }
                Ok(())
            },
        );
        run.unwrap();
    }
}

/// A long prompt is read in chunks. No chunk may be lost.
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
    let over_context = layouts().filter(|layout| layout.context > 1);
    for layout in over_context.chain([ALONE, layouts().last().unwrap()]) {
        let run = layout.run(&config, &choices, DType::F64, |model, groups, placement| {
            let mut generator =
                Generator::new(model, groups, &Device::flex()).with_placement(placement);
            if let Some(logits) = generator.logits_after(&tokens)? {
                assert_all_near(&format!("{layout:?}"), &logits, &whole, 1e-12);
            }
            // A capacity of 1280 tokens does not fit, but 1200 tokens do. A rank of a context group has a part of the
            // tokens.
            let width = config.hidden / config.heads;
            let heads = config.heads / layout.tensor;
            let layers = LAYERS / layout.pipeline;
            let allocated = match layout.context {
                1 => 1200,
                2 => 600,
                _ => 300,
            };
            assert_eq!(
                generator.cache_bytes(),
                2 * layers * allocated * heads * width * 8
            );
            Ok(())
        });
        run.unwrap();
    }
}
