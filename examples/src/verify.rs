//! `burn-megatron verify`.

use std::process::ExitCode;

use burn_megatron::choice::Choices;
use burn_megatron::nn::fp8::Fp8Config;
use burn_megatron::nn::{Activation, NormKind};
use burn_megatron::verify::{FP8_TOLERANCE, Layout, Options, verify};
use burn_megatron_models::{Positions, TransformerConfig, TransformerSubject};

use crate::cli::{VerifyArgs, VerifyModel};
use crate::fp8::{self, Fp8Choice};
use crate::recipe::{Error, Recipe};

/// Prints a table per model; the exit code says whether all passed.
pub fn run(args: &VerifyArgs) -> Result<ExitCode, Error> {
    let layouts = match args.layouts.is_empty() {
        true => [Layout::standard(), Layout::pipelines(), Layout::sharded()].concat(),
        false => args.layouts.clone(),
    };
    let (models, fp8) = models(args)?;
    let in_8_bits = fp8::is_on(&fp8);
    let usual = match in_8_bits {
        true => FP8_TOLERANCE,
        false => Options::default().tolerance,
    };
    let options = Options {
        steps: usize::from(args.steps),
        tolerance: args.tolerance.unwrap_or(usual),
        same_micro_batches: in_8_bits,
        progress: |layout| eprintln!("  {layout}"),
        ..Options::default()
    };
    for (_, config) in &models {
        for layout in &layouts {
            config
                .check(layout.tensor, layout.sequence_parallel)
                .map_err(|error| format!("layout {layout}: {error}"))?;
        }
    }
    let mut kernels = Choices::default();
    for choices in &args.kernels {
        kernels.set(choices)?;
    }
    let mut passes = true;
    for (name, config) in models {
        eprintln!("{name}");
        let subject = TransformerSubject {
            config,
            seed: args.seed,
            samples: args.samples,
            kernels,
            packed: args.packed,
            fp8: fp8.clone(),
        };
        let report = verify(&subject, &layouts, &options)?;
        println!("{name}\n{report}\n");
        passes &= report.passes();
    }
    println!(
        "{}",
        if passes {
            "all layouts pass"
        } else {
            "some layouts FAIL"
        }
    );
    Ok(if passes {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// The models by name, and their 8-bit layers.
fn models(args: &VerifyArgs) -> Result<(Vec<(String, TransformerConfig)>, Fp8Config), Error> {
    let (models, mut fp8) = match &args.recipe {
        Some(path) => {
            let recipe = Recipe::read(path)?;
            fp8::check(&recipe)?;
            let name = path.display().to_string();
            (vec![(name, recipe.model)], recipe.fp8)
        }
        None => {
            let models = args.models.iter();
            let models = models.map(|model| (format!("{model:?}"), model.config()));
            (models.collect(), Fp8Config::default())
        }
    };
    match args.fp8 {
        Some(Fp8Choice(None)) => fp8 = Fp8Config::default(),
        Some(Fp8Choice(recipe)) => fp8.recipe = recipe,
        None => {}
    }
    Ok((models, fp8))
}

impl VerifyModel {
    /// Small, with everything on that could go wrong: dropout, a vocabulary to be padded.
    fn config(self) -> TransformerConfig {
        let gpt = TransformerConfig {
            vocabulary: 53,
            context: 16,
            hidden: 32,
            layers: 8,
            heads: 4,
            dropout: 0.1,
            attention_dropout: 0.1,
            ..TransformerConfig::gpt2()
        };
        let llama = TransformerConfig {
            // Attention is fused where its probabilities are not dropped.
            attention_dropout: 0.0,
            groups: Some(2),
            norm: NormKind::Rms,
            activation: Activation::SwiGlu,
            positions: Positions::rotary(10_000.0),
            bias: false,
            tied: false,
            ..gpt.clone()
        };
        match self {
            Self::Gpt => gpt,
            Self::GptUntied => TransformerConfig {
                tied: false,
                label_smoothing: 0.1,
                ..gpt
            },
            Self::Llama => llama,
            Self::LlamaTied => TransformerConfig {
                tied: true,
                groups: Some(1),
                ..llama
            },
        }
    }
}
