//! The flags of `plan`.

use std::path::PathBuf;

use burn_megatron::data_parallel::Precision;
use burn_megatron::mesh::ScheduleKind;
use burn_megatron_plan::Recompute;
use burn_megatron_plan::hardware::Hardware;
use burn_megatron_plan::search::FixedSettings;
use clap::Args;

use crate::byte_size::ByteSize;
use crate::data_parallel::precision;
use crate::error::Error;
use crate::set::SetArgs;

/// Flags of `plan`.
#[derive(Args)]
pub struct PlanArgs {
    /// The model: a Hugging Face folder, or a config.json. The weights are not read.
    #[arg(long, value_name = "HF_FOLDER|config.json", required_unless_present_any = ["recipe", "measure"])]
    pub model: Option<PathBuf>,
    /// A recipe that contains the model, the batch size and the precision. The layout in the recipe is used only with
    /// --own-layout.
    #[arg(
        long,
        visible_alias = "config",
        value_name = "FILE.toml",
        conflicts_with = "model"
    )]
    pub recipe: Option<PathBuf>,
    /// Flags that set keys of the recipe.
    #[command(flatten)]
    pub set: SetArgs,
    /// Plan the layout of the recipe instead of searching for one. The exit code is 1 if the layout does not fit.
    #[arg(long, requires = "recipe", conflicts_with_all = ["fix", "top", "write_recipe"])]
    pub own_layout: bool,
    /// The number and the kind of the devices, as in 64xH100. The kind is H100, H200, B200, A100 or MI300X. With
    /// --hardware, give only the number. With --own-layout, the number is optional, because the recipe determines it.
    #[arg(
        long,
        value_name = "NxDEVICE",
        required_unless_present_any = ["measure", "own_layout"],
        default_value = "",
        hide_default_value = true
    )]
    pub devices: String,
    /// A file with the throughput, the memory and the links of the devices, in the format of the files in
    /// burn-megatron-plan/src/hardware.
    #[arg(long, value_name = "FILE.toml")]
    pub hardware: Option<PathBuf>,
    /// Number of tokens per sequence. The default is the sequence length of the recipe, or the maximum sequence length
    /// of the model.
    #[arg(long, value_name = "N")]
    pub sequence_length: Option<usize>,
    /// Number of samples per step. The default is the global batch size of the recipe.
    #[arg(
        long,
        visible_alias = "batch-size",
        value_name = "N",
        required_unless_present_any = ["recipe", "measure"]
    )]
    pub global_batch_size: Option<usize>,
    /// The compute dtype of the model. The default is the precision of the recipe, or bf16.
    #[arg(long, value_name = "f32|bf16|f16", value_parser = precision)]
    pub precision: Option<Precision>,
    /// Maximum memory per device that a plan may use, as in 72GiB. The default is the whole memory of the device.
    #[arg(long, value_name = "BYTES")]
    pub memory_limit: Option<ByteSize>,
    /// Settings with a fixed value, which are not searched: tensor, sequence_parallel, tp_comm_overlap,
    /// tp_comm_overlap_num_splits, overlap_moe_expert_parallel_comm, ranks_per_node, context, pipeline, schedule,
    /// virtual_stages, expert, expert_tensor, data, zero_stage, hsdp, micro_batch, recompute, offload.
    #[arg(long, value_name = "SETTING=VALUE,..", value_delimiter = ',')]
    pub fix: Vec<String>,
    /// The number of plans to show.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..))]
    pub top: u16,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    /// Write the recipe of the best plan to this file.
    #[arg(long, value_name = "FILE.toml")]
    pub write_recipe: Option<PathBuf>,
    /// Write a plot to this file that shows the memory of the best plan during a step, by kind of memory and by
    /// pipeline rank.
    #[arg(long, value_name = "FILE.svg")]
    pub svg: Option<PathBuf>,
    /// Instead of planning, measure the CPU of this machine with the number of ranks in --ranks, which run as threads,
    /// and write a hardware file.
    #[arg(long, value_name = "FILE.toml", conflicts_with_all = ["model", "recipe"])]
    pub measure: Option<PathBuf>,
    /// Number of ranks for --measure. They run as threads.
    #[arg(long, value_name = "N", requires = "measure", default_value_t = 1)]
    pub ranks: usize,
}

impl PlanArgs {
    /// Returns the bytes of a device that a plan may use.
    pub fn memory_limit(&self, hardware: &Hardware) -> u64 {
        self.memory_limit.map_or(hardware.memory, |limit| limit.0)
    }
}

/// The setting of `--fix` whose value depends on the overlap method that `tp_comm_overlap` sets.
const NUM_SPLITS: &str = "tp_comm_overlap_num_splits";

/// Applies `--fix` on top of the settings that are `given`.
///
/// # Errors
///
/// Returns an error for an unknown setting or an invalid value.
pub fn fixed(settings: &[String], given: FixedSettings) -> Result<FixedSettings, Error> {
    let mut fixed = given;
    for setting in settings {
        let (name, value) = setting.split_once('=').ok_or_else(|| {
            format!("invalid --fix {setting}: expected SETTING=VALUE, as in tensor=8")
        })?;
        let refused = |expected: &str| format!("invalid --fix {setting}: expected {expected}");
        let number = || {
            let number: Option<usize> = value.parse().ok().filter(|number| *number > 0);
            number.ok_or_else(|| refused("a number above 0"))
        };
        match name {
            "tensor" => fixed.tensor = Some(number()?),
            "ranks_per_node" => fixed.given.ranks_per_node = Some(number()?),
            "context" => fixed.context = Some(number()?),
            "pipeline" => fixed.pipeline = Some(number()?),
            "virtual_stages" => fixed.virtual_stages = Some(number()?),
            "expert" => fixed.expert = Some(number()?),
            "expert_tensor" => fixed.expert_tensor = Some(number()?),
            "data" => fixed.data = Some(number()?),
            "hsdp" => fixed.hsdp = Some(number()?),
            "micro_batch" => fixed.micro_batch = Some(number()?),
            "tp_comm_overlap" => {
                fixed.given.tp_comm_overlap = Some(value.parse()?);
                // The number in the recipe belongs to the method in the recipe.
                let is_splits = |setting: &String| setting.starts_with(NUM_SPLITS);
                if !settings.iter().any(is_splits) {
                    fixed.given.tp_comm_overlap_num_splits = None;
                }
            }
            NUM_SPLITS => fixed.given.tp_comm_overlap_num_splits = Some(number()?),
            "sequence_parallel" => {
                let value = value.parse().map_err(|_| refused("true or false"))?;
                fixed.sequence_parallel = Some(value);
            }
            "overlap_moe_expert_parallel_comm" => {
                let value = value.parse().map_err(|_| refused("true or false"))?;
                fixed.given.overlap_moe_expert_parallel_comm = value;
            }
            "schedule" => {
                let kind: ScheduleKind = value.parse()?;
                fixed.schedule = Some(kind);
            }
            "zero_stage" => {
                let stage = value.parse().map_err(|_| refused("0, 1, 2 or 3"))?;
                fixed.zero_stage = Some(stage);
            }
            "recompute" => {
                let found = Recompute::ALL.into_iter().find(|kind| kind.name() == value);
                fixed.recompute =
                    Some(found.ok_or_else(|| refused("none, selective, full or full-offloaded"))?);
            }
            "offload" => {
                let share: Option<f64> = value.parse().ok();
                let share = share.filter(|share| (0.0..=1.0).contains(share));
                fixed.offload = Some(share.ok_or_else(|| refused("a share from 0 to 1"))?);
            }
            _ => {
                return Err(refused(
                    "tensor, sequence_parallel, tp_comm_overlap, tp_comm_overlap_num_splits, \
                     overlap_moe_expert_parallel_comm, ranks_per_node, context, \
                     pipeline, schedule, virtual_stages, expert, expert_tensor, data, zero_stage, hsdp, micro_batch, recompute or offload",
                )
                .into());
            }
        }
    }
    Ok(fixed)
}

/// Splits `--devices` into the number and the name of the devices. A text without a number has `ranks` devices, if
/// `ranks` is given.
///
/// # Errors
///
/// Returns an error if the number is not above 0, or if there is no `x` before the name.
pub fn devices(text: &str, ranks: Option<usize>) -> Result<(usize, Option<&str>), Error> {
    let (number, name) = match text.split_once('x') {
        Some((number, name)) => (number, Some(name)),
        None => (text, None),
    };
    let has_number = text.starts_with(|first: char| first.is_ascii_digit());
    if let Some(ranks) = ranks.filter(|_| !has_number) {
        return Ok((ranks, Some(text).filter(|name| !name.is_empty())));
    }
    let number: Option<usize> = number.parse().ok().filter(|number| *number > 0);
    match number {
        Some(number) if number <= MAX_DEVICES => Ok((number, name)),
        Some(_) => Err(format!("invalid --devices {text}: expected at most {MAX_DEVICES}").into()),
        None => Err(format!(
            "invalid --devices {text}: expected a number and a device, as in 64xH100"
        )
        .into()),
    }
}

/// Maximum number of devices. Numbers up to this limit have few divisors.
const MAX_DEVICES: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_setting_is_named() {
        let of = |text: &str| {
            let fixed = fixed(&[text.to_string()], FixedSettings::default());
            fixed.map_err(|error| error.to_string())
        };
        assert_eq!(of("tensor=8").unwrap().tensor, Some(8));
        assert_eq!(
            of("recompute=full").unwrap().recompute,
            Some(Recompute::Full)
        );
        for (wrong, says) in [
            ("tensor", "expected SETTING=VALUE, as in tensor=8"),
            (
                "tensor=0",
                "invalid --fix tensor=0: expected a number above 0",
            ),
            ("tensr=8", "expected tensor, sequence_parallel"),
            (
                "recompute=some",
                "expected none, selective, full or full-offloaded",
            ),
            (
                "offload=2",
                "invalid --fix offload=2: expected a share from 0 to 1",
            ),
            ("schedule=x", "invalid schedule \"x\""),
        ] {
            let error = of(wrong).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
        for ranks in [None, Some(2)] {
            assert_eq!(devices("64xH100", ranks).unwrap(), (64, Some("H100")));
            assert_eq!(devices("8", ranks).unwrap(), (8, None));
            assert!(devices("0xH100", ranks).is_err());
            assert!(devices("9999999xA100", ranks).is_err());
        }
        for wrong in ["", "H100", "-1"] {
            assert!(devices(wrong, None).is_err(), "{wrong}");
        }
        assert_eq!(devices("H100", Some(2)).unwrap(), (2, Some("H100")));
        assert_eq!(devices("", Some(2)).unwrap(), (2, None));
    }
}
