//! Draws the configuration of a round.

use std::fmt::Write;

use crate::draw::Random;

/// Steps of a run at the least and at the most.
const STEPS: (usize, usize) = (16, 40);

/// The configuration of a round: a recipe, and flags.
pub struct RoundConfig {
    pub recipe: String,
    /// Flags that both runs have.
    pub flags: Vec<String>,
    /// Flags of checkpoints, for the disturbed run.
    pub saving: Vec<String>,
    pub steps: usize,
    pub ranks: usize,
    /// How many checkpoints are kept at the least.
    pub kept: usize,
}

impl RoundConfig {
    pub fn new(random: &mut Random) -> Self {
        let [tensor, pipeline] = [(); 2].map(|()| random.within((1, 2)));
        let data = random.one_of(&[1, 2, 2, 4]);
        let steps = random.within(STEPS);
        let mut flags = Vec::new();
        let mut flag = |name: &str, value: &str| flags.extend([name.to_owned(), value.to_owned()]);
        flag("--tp", &tensor.to_string());
        flag("--pp", &pipeline.to_string());
        flag("--dp", &data.to_string());
        flag("--steps", &steps.to_string());
        if tensor == 2 && random.once_in(2) {
            flag("--sp", "true");
        }
        if pipeline == 2 {
            let schedules = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"];
            flag("--pipeline-schedule", random.one_of(&schedules));
        }
        let precision = random.one_of(&["f32", "f32", "bf16", "f16"]);
        flag("--precision", precision);
        let fp8 = match precision {
            "bf16" => random.one_of(&["none", "current", "delayed"]),
            _ => "none",
        };
        if fp8 != "none" {
            flag("--fp8", fp8);
        }
        if data > 1 {
            // ZeRO-3 needs a single stage per rank.
            let stage = random.below(if pipeline == 1 { 4 } else { 3 });
            flag("--zero-stage", &stage.to_string());
            if matches!(stage, 1 | 2) && random.once_in(2) {
                flag("--overlap-param-gather", "true");
            }
            if matches!(stage, 1 | 2) && fp8 == "delayed" && random.once_in(2) {
                flag("--fp8-param-gather", "true");
            }
            if stage > 0 && precision != "f32" && random.once_in(2) {
                flag("--reduce-in-16-bits", "true");
            }
            if stage > 0 && data == 4 && random.once_in(2) {
                flag("--hsdp", "2");
            }
        }
        let (saving, kept) = saving(random);
        Self {
            recipe: recipe(random),
            flags,
            saving,
            steps,
            ranks: tensor * pipeline * data,
            kept,
        }
    }
}

fn saving(random: &mut Random) -> (Vec<String>, usize) {
    let every = random.within((2, 6)).to_string();
    let mut flags = vec!["--save-every".to_owned(), every];
    if random.once_in(2) {
        flags.extend(["--async-save".to_owned(), "true".to_owned()]);
    }
    let kept = match random.below(4) {
        0 => usize::MAX,
        kept => kept,
    };
    if kept < usize::MAX {
        flags.extend(["--keep-last".to_owned(), kept.to_string()]);
    }
    (flags, kept)
}

/// A small model whose sizes fit every layout that is drawn.
fn recipe(random: &mut Random) -> String {
    let mut recipe = String::from(
        "[model]\nfamily = \"gpt2\"\nlayers = 4\nhidden = 32\nheads = 4\ncontext = 16\ndropout = 0.1\n",
    );
    if random.once_in(2) {
        recipe += "groups = 2\nnorm = \"rms\"\nactivation = \"swi-glu\"\nbias = false\n\
                   positions = { rotary = { base = 10000.0 } }\n";
    }
    let (tied, seed) = (random.once_in(2), random.below(1000));
    write!(
        recipe,
        "tied = {tied}\n\n[train]\nmicro_batch_size = 1\nglobal_batch_size = 8\nheld_out_samples = 8\n\
         evaluate_every = 7\nlearning_rate = 1e-3\nwarmup_steps = 2\nseed = {seed}\n\n\
         [sample]\nprompt = \"fn\"\ntokens = 4\n"
    )
    .expect("writing to a String cannot fail");
    recipe
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_differ_and_keep_something() {
        let drawn: Vec<_> = (0..300)
            .map(|n| RoundConfig::new(&mut Random::new(1, n)))
            .collect();
        let has = |flag: &str| {
            drawn
                .iter()
                .any(|drawn| drawn.flags.iter().any(|f| f == flag))
        };
        for flag in [
            "--sp",
            "--pipeline-schedule",
            "--fp8",
            "--hsdp",
            "--fp8-param-gather",
            "zb-v",
            "f16",
        ] {
            assert!(has(flag), "{flag}");
        }
        assert!(
            drawn
                .iter()
                .all(|drawn| drawn.kept > 0 && drawn.ranks <= 16)
        );
    }
}
