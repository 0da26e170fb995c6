//! Tests of speculative generation: the same text as without it, in fewer forward passes.

use burn::tensor::{DType, Device};
use burn_megatron::kernel_selection::KernelChoices;
use burn_megatron_data::tokenizer::Tokenizer;
use burn_megatron_generate::{GenerateConfig, GenerateError, GenerationOutput, Generator, Written};
use burn_megatron_models::{MtpConfig, TransformerConfig};

use super::batch::assert_same;
use super::{ALONE, AnyError, TestLayout, layouts, models};

/// Returns models with few tokens, so that some drafts are correct without training.
fn drafting() -> impl Iterator<Item = (&'static str, TransformerConfig)> {
    models().into_iter().skip(1).map(|(name, config)| {
        let config = TransformerConfig {
            vocabulary: 5,
            context: 40,
            init_std: 0.3,
            attention_dropout: 0.0,
            attention_soft_cap: None,
            mtp: Some(MtpConfig {
                layers: if name == "Llama" { 2 } else { 1 },
                ..MtpConfig::default()
            }),
            ..config
        };
        (name, config)
    })
}

/// Returns prompts of several lengths. The longest prompt exceeds the context.
fn prompts() -> Vec<Vec<u32>> {
    [3, 1, 17, 26]
        .map(|len| (0..len).map(|i| (i * i + len) % 5).collect())
        .to_vec()
}

/// Returns the generated texts on every rank.
fn written(
    config: &TransformerConfig,
    speculative: bool,
    layout: TestLayout,
    batch_size: usize,
) -> Vec<Vec<GenerationOutput>> {
    let settings = GenerateConfig {
        tokens: 20,
        temperature: 0.9,
        seed: Some(5),
        logprobs: true,
        speculative,
        ..GenerateConfig::default()
    };
    let choices = KernelChoices::default();
    let run = layout.run(config, &choices, DType::F32, |model, groups, placement| {
        let mut generator =
            Generator::new(model, groups, &Device::flex()).with_placement(placement);
        let bytes = Tokenizer::bytes();
        let on_text = &mut |_: usize, _: Written<'_>| Ok(());
        let mut write =
            || generator.generate_batch(&prompts(), batch_size, &settings, &bytes, on_text);
        write()?;
        // Uses the cache of the previous texts.
        Ok::<_, AnyError>(write()?)
    });
    run.unwrap()
}

#[test]
fn a_speculative_text_is_the_text_without() {
    for (number, (name, config)) in drafting().enumerate() {
        // Each layout is tested with some of the models.
        let layouts = layouts().enumerate();
        let own = layouts.filter(|(layout, _)| (layout + number).is_multiple_of(4));
        for (_, layout) in own {
            let plain = written(&config, false, layout, 3).swap_remove(0);
            for batch_size in [1, 3] {
                for texts in written(&config, true, layout, batch_size) {
                    let what = format!("{name}, {layout:?}, {batch_size} at a time");
                    assert_same(&what, &texts, &plain);
                    let drafted: usize = texts.iter().map(|text| text.drafted).sum();
                    let accepted: usize = texts.iter().map(|text| text.accepted).sum();
                    assert!(
                        accepted >= 4 && accepted < drafted,
                        "{what}: {accepted} of {drafted}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_model_without_further_tokens_cannot_draft() {
    let (_, config) = drafting().next().unwrap();
    let config = TransformerConfig {
        mtp: None,
        ..config
    };
    let choices = KernelChoices::default();
    let run = ALONE.run(&config, &choices, DType::F32, |model, groups, _| {
        let settings = GenerateConfig {
            speculative: true,
            ..GenerateConfig::default()
        };
        let mut generator = Generator::new(model, groups, &Device::flex());
        let error = generator.generate(&[1], &settings, &Tokenizer::bytes(), &mut |_| Ok(()));
        assert!(matches!(error, Err(GenerateError::NoDrafts)), "{error:?}");
        Ok(())
    });
    run.unwrap();
}
