//! The flags of NCCL.

use burn_megatron::comm::{Engine, NcclConfig, NcclGroupSetting, RegisteredBuffers};
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};

/// Flags of NCCL; each overrides a key of `[nccl]`.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Communication")]
pub struct NcclArgs {
    /// Create NCCL's communicators with their groups, by splits, instead of at the first call of each group.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", hide_short_help = true)]
    pub nccl_eager_init: Option<bool>,
    /// CTAs and stream of the NCCL communicators of a group: tensor, context, expert, data, pipeline, world, or messages;
    /// as in tensor:min_ctas=4,max_ctas=16,high_priority_stream=true. May be repeated.
    #[arg(long, value_name = "GROUP:KEY=VALUE,..", hide_short_help = true)]
    pub nccl_group: Vec<NcclGroupSetting>,
    /// Register memory with NCCL for collectives on large tensors: allocations (those of tensors), or windows (symmetric
    /// ones, with copies there and back). The header says what was registered.
    #[arg(
        long,
        value_name = "allocations|windows",
        num_args = 0..=1,
        default_missing_value = "allocations",
        value_parser = registered_buffers(),
        hide_short_help = true
    )]
    pub nccl_registered: Option<RegisteredBuffers>,
}

/// Returns the line of the header about settings of a recipe that another engine does not have; `engine` begins with
/// its name.
pub fn unused(config: &NcclConfig, engine: &str) -> Option<&'static str> {
    let is_nccl = engine.starts_with(&Engine::Nccl.to_string());
    let is_unused = !is_nccl && !config.is_default();
    is_unused.then_some("[nccl] of the recipe is for the engine nccl, and not used here")
}

fn registered_buffers() -> impl TypedValueParser<Value = RegisteredBuffers> {
    PossibleValuesParser::new(["allocations", "windows"]).map(|name| match name.as_str() {
        "windows" => RegisteredBuffers::Windows,
        _ => RegisteredBuffers::Allocations,
    })
}

impl NcclArgs {
    /// The first flag that is set.
    pub fn first_flag(&self) -> Option<&'static str> {
        let set = [
            ("--nccl-eager-init", self.nccl_eager_init.is_some()),
            ("--nccl-group", !self.nccl_group.is_empty()),
            ("--nccl-registered", self.nccl_registered.is_some()),
        ];
        set.into_iter()
            .find(|(_, is_set)| *is_set)
            .map(|(flag, _)| flag)
    }

    /// Applies the flags to the settings of a recipe.
    pub fn apply(&self, config: &mut NcclConfig) {
        config.eager_init = self.nccl_eager_init.unwrap_or(config.eager_init);
        config.registered_buffers = self.nccl_registered.or(config.registered_buffers);
        for set in &self.nccl_group {
            let group = config.groups.entry(set.group).or_default();
            *group = set.config.or(*group);
        }
    }
}

#[cfg(test)]
mod tests {
    use burn_megatron::comm::NcclGroup;
    use burn_megatron::device::DeviceKind;

    use super::*;
    use crate::family::Families;
    use crate::flags::parse_text;
    use crate::pretrain::args::PretrainArgs;
    use crate::ranks::set_up;
    use crate::recipe::{DEFAULT_RECIPE, Recipe};

    fn resolve(flags: &str) -> NcclConfig {
        let families = Families::transformers();
        let args = parse_text(flags).unwrap();
        let layers = Recipe::resolve(&args, &families, DEFAULT_RECIPE).unwrap();
        layers.recipe.nccl
    }

    #[test]
    fn flags_override_keys_of_the_recipe() {
        assert!(resolve("").is_default());
        let config = resolve(
            "--set nccl.groups.tensor.max_ctas=16 --nccl-group tensor:min_ctas=4 \
             --nccl-group data:max_ctas=8,high_priority_stream=false --nccl-registered windows --nccl-eager-init",
        );
        let [tensor, data] = [NcclGroup::Tensor, NcclGroup::Data].map(|group| config.group(group));
        assert_eq!((tensor.min_ctas, tensor.max_ctas), (Some(4), Some(16)));
        assert_eq!(
            (data.max_ctas, data.high_priority_stream),
            (Some(8), Some(false))
        );
        assert_eq!(config.registered_buffers, Some(RegisteredBuffers::Windows));
        assert!(config.eager_init);
        let plain = resolve("--nccl-registered");
        assert_eq!(
            plain.registered_buffers,
            Some(RegisteredBuffers::Allocations)
        );
    }

    #[test]
    fn flags_without_the_engine_are_refused() {
        for flag in [
            "--nccl-group tensor:max_ctas=16",
            "--nccl-registered",
            "--nccl-eager-init",
        ] {
            let args: PretrainArgs = parse_text(flag).unwrap();
            let refused = set_up(&args.ranks, DeviceKind::Cpu, 1).err().unwrap();
            let expected = "applies to processes with --engine nccl only; remove it";
            let name = flag.split(' ').next().unwrap();
            assert_eq!(refused.to_string(), format!("{name} {expected}"));
        }
    }

    /// A recipe is for any engine: what one does not use is said.
    #[test]
    fn settings_of_a_recipe_without_the_engine_are_said_to_be_unused() {
        let config = resolve("--set nccl.groups.tensor.max_ctas=16");
        let text = unused(&config, "mpi, Open MPI v4.1.4").unwrap();
        assert!(text.contains("[nccl]") && text.contains("not used"));
        assert_eq!(unused(&config, "nccl, NCCL 2.27.3 (libnccl.so.2)"), None);
        assert_eq!(unused(&NcclConfig::default(), "threads"), None);
    }

    #[test]
    fn numbers_that_nccl_refuses_are_refused_in_a_recipe_too() {
        let families = Families::transformers();
        let text = "--set nccl.groups.data.max_ctas=65 --dry-run";
        let layers = Recipe::resolve(&parse_text(text).unwrap(), &families, DEFAULT_RECIPE);
        let error = layers.unwrap().recipe.nccl.check().unwrap_err().to_string();
        assert_eq!(
            error,
            "invalid nccl.groups.data.max_ctas = 65: expected 1 to 64"
        );
    }
}
