//! Implements `burn-megatron checkpoint upcycle`.

use std::process::ExitCode;

use burn_megatron::checkpoint::{Checkpoint, check_output};
use burn_megatron_models::hf::{HfConfig, HfFamily, ModelFamily};
use burn_megatron_models::upcycle::{Upcycled, save};
use burn_megatron_models::{MoeConfig, TransformerConfig};
use indicatif::HumanBytes;
use toml::{Table, Value};

use super::args::UpcycleArgs;
use super::bar;
use crate::convert::total;
use crate::error::Error;
use crate::family::Families;
use crate::numbers::count;

/// Settings of experts that are printed even if they have their default value.
const NAMED: [&str; 2] = ["experts", "experts_per_token"];

/// Writes a dense checkpoint as a checkpoint of a model with experts.
pub fn run(args: &UpcycleArgs, families: &Families) -> Result<ExitCode, Error> {
    let from = Checkpoint::open(&args.path)?;
    let dense = families.model_of(&from)?;
    let name = from.path().display();
    let Some(dense) = dense.as_transformer() else {
        let family = dense.family();
        return Err(format!("{name}: a model of the family {family:?} cannot have experts").into());
    };
    let config = args.config();
    let upcycled = Upcycled::new(&from, dense, &config)
        .map_err(|error| format!("cannot upcycle {name}: {error}"))?;
    check_output(&args.to, &[from.path()])?;
    let bar = bar(total(&upcycled));
    let to = save(&upcycled, &from, &args.to, &mut |bytes| bar.inc(bytes))?;
    bar.finish_and_clear();

    let model = upcycled.model();
    let moe = model.moe.clone().unwrap_or_default();
    let blocks = (0..model.layers).filter(|number| moe.is_in(*number));
    println!(
        "{}: {} experts of width {} in {} of {}, {} per token; {}",
        to.path().display(),
        moe.experts,
        moe.expert_width.unwrap_or_default(),
        blocks.count(),
        count(model.layers, "block"),
        moe.experts_per_token,
        HumanBytes(total(&upcycled)),
    );
    match config.difference() {
        None => println!("the outputs of the new model equal the outputs of {name}"),
        Some(difference) => {
            println!("the outputs of the new model differ from the outputs of {name}: {difference}")
        }
    }
    if let Err(error) = HfConfig::<ModelFamily>::of(model) {
        println!("convert cannot export this model: {error}");
    }
    println!(
        "the checkpoint has weights only: start a run with pretrain --load {}, and add these settings of the model to \
         the recipe:\n\n{}",
        args.to.display(),
        recipe(model)?
    );
    Ok(ExitCode::SUCCESS)
}

/// Returns the part of a recipe that differs from the settings of the dense model.
fn recipe(model: &TransformerConfig) -> Result<String, Error> {
    let table = |moe: &Option<MoeConfig>| Table::try_from(moe.clone().unwrap_or_default());
    let mut moe = table(&model.moe)?;
    for (key, value) in table(&None)? {
        if moe.get(&key) == Some(&value) && !NAMED.contains(&&key[..]) {
            moe.remove(&key);
        }
    }
    let mut settings = Table::new();
    if let Ok(config) = HfConfig::<ModelFamily>::of(model) {
        settings.insert("family".into(), config.family.name().into());
    }
    settings.insert("mlp_width".into(), Value::try_from(model.mlp_width)?);
    settings.insert("moe".into(), moe.into());
    let recipe = Table::from_iter([("model".to_string(), settings.into())]);
    Ok(toml::to_string(&recipe)?)
}
