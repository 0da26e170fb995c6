//! Draws the configuration of a round.

use crate::draw::{self, Random, Settings};

/// The smallest and the largest number of steps of a run.
const STEPS: (usize, usize) = (16, 40);

/// The configuration of a round: a recipe, and flags.
pub struct RoundConfig {
    pub settings: Settings,
    /// Checkpoint flags for the disturbed run.
    pub saving: Vec<String>,
    pub steps: usize,
    pub ranks: usize,
    /// The minimum number of checkpoints that are kept.
    pub kept: usize,
}

impl RoundConfig {
    /// Draws a recipe as `fuzz-layouts` does, for more steps, in a type that is used for training. The program may
    /// refuse the recipe in this type.
    pub fn new(random: &mut Random) -> Self {
        let mut settings = draw::recipe(random);
        let steps = random.within(STEPS);
        train(&mut settings, steps);
        precision(&mut settings, random);
        let (saving, kept) = saving(random);
        let axes = ["tensor", "context", "data", "pipeline"];
        let sizes = axes.map(|axis| settings.number(&format!("parallel.{axis}")).unwrap_or(1));
        Self {
            saving,
            steps,
            ranks: sizes.iter().product(),
            kept,
            settings,
        }
    }

    /// Returns the layout, for the log.
    pub fn layout(&self) -> String {
        let is_layout =
            |key: &&str| key.starts_with("parallel.") || key.starts_with("data_parallel.");
        let keys = self.settings.keys().filter(is_layout);
        let pairs = keys.filter_map(|key| Some(format!("{key}={}", self.settings.get(key)?)));
        pairs.collect::<Vec<_>>().join(" ")
    }
}

/// Sets a longer run on text, with evaluations.
fn train(settings: &mut Settings, steps: usize) {
    // The program refuses the last two keys on a CPU.
    for key in [
        "data",
        "sample",
        "train.cuda_graph",
        "kernels.epilogue_fusion",
    ] {
        settings.remove(key);
    }
    settings.set("train.steps", steps);
    settings.set("train.warmup_steps", 2);
    settings.set("train.held_out_samples", 8);
    settings.set("train.evaluate_every", 7);
    settings.set_text("sample.prompt", "fn");
    settings.set("sample.tokens", 4);
}

fn precision(settings: &mut Settings, random: &mut Random) {
    let precision = random.one_of(&["f32", "f32", "bf16", "f16"]);
    settings.set_text("data_parallel.precision", precision);
    if precision == "bf16" && random.once_in(2) {
        let recipe = random.one_of(&["current", "delayed"]);
        settings.set_text("fp8.recipe", recipe);
    }
    let stage = settings.number("data_parallel.zero_stage").unwrap_or(0);
    let gathers = matches!(stage, 1 | 2) && settings.is("fp8.recipe", "delayed");
    if gathers && random.once_in(2) {
        settings.set("data_parallel.fp8_param_gather", true);
    }
    if stage > 0 && precision != "f32" && random.once_in(2) {
        settings.set("data_parallel.reduce_in_16_bits", true);
    }
}

fn saving(random: &mut Random) -> (Vec<String>, usize) {
    let every = random.within((2, 6)).to_string();
    let mut flags = vec!["--save-every".to_owned(), every];
    if random.once_in(2) {
        flags.extend(["--checkpoint.asynchronous".to_owned(), "true".to_owned()]);
    }
    let kept = match random.below(4) {
        0 => usize::MAX,
        kept => kept,
    };
    if kept < usize::MAX {
        flags.extend(["--checkpoint.keep_last".to_owned(), kept.to_string()]);
    }
    (flags, kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_differ_and_keep_something() {
        let drawn: Vec<_> = (0..2000)
            .map(|n| RoundConfig::new(&mut Random::new(1, n)))
            .collect();
        for setting in [
            "parallel.sequence_parallel",
            "parallel.schedule=zb-v",
            "fp8.recipe",
            "data_parallel.hsdp",
            "data_parallel.fp8_param_gather",
            "data_parallel.precision=f16",
        ] {
            assert!(
                drawn.iter().any(|drawn| drawn.settings.matches(setting)),
                "{setting}"
            );
        }
        let fits = |drawn: &RoundConfig| drawn.kept > 0 && (2..=8).contains(&drawn.ranks);
        assert!(drawn.iter().all(fits));
    }
}
