//! `burn-megatron verify`.

use std::process::ExitCode;

use burn_megatron::choice::Choices;
use burn_megatron::nn::{Activation, NormKind};
use burn_megatron::verify::{Layout, Options, verify};
use burn_megatron_models::{Positions, TransformerConfig, TransformerSubject};

use crate::cli::{VerifyArgs, VerifyModel};
use crate::recipe::{Error, Recipe};

/// Prints a table per model; the exit code says whether all passed.
pub fn run(args: &VerifyArgs) -> Result<ExitCode, Error> {
    let layouts = match args.layouts.is_empty() {
        true => [Layout::standard(), Layout::pipelines(), Layout::sharded()].concat(),
        false => args.layouts.clone(),
    };
    let options = Options {
        steps: usize::from(args.steps),
        tolerance: args.tolerance,
        progress: |layout| eprintln!("  {layout}"),
        ..Options::default()
    };
    let models = match &args.recipe {
        Some(path) => vec![(path.display().to_string(), Recipe::read(path)?.model)],
        None => args
            .models
            .iter()
            .map(|model| (format!("{model:?}"), model.config()))
            .collect(),
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
