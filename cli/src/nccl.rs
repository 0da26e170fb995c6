//! The NCCL settings of a run.

use burn_megatron::comm::{Engine, NcclConfig};

/// Returns a header line if the recipe has NCCL settings but the run uses another engine. `engine` begins with the
/// name of the engine.
pub fn unused(config: &NcclConfig, engine: &str) -> Option<&'static str> {
    let is_nccl = engine.starts_with(&Engine::Nccl.to_string());
    let is_unused = !is_nccl && !config.is_default();
    is_unused.then_some("[nccl] of the recipe is not used, because it requires the engine nccl")
}

#[cfg(test)]
mod tests {
    use burn_megatron::comm::{NcclGroup, RegisteredBuffers};
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
            "--set nccl.groups.tensor.max_ctas=16 --nccl.groups.tensor.min_ctas 4 --nccl.groups.data.max_ctas 8 \
             --nccl.groups.data.high_priority_stream false --nccl.registered_buffers windows --nccl.eager_init",
        );
        let [tensor, data] = [NcclGroup::Tensor, NcclGroup::Data].map(|group| config.group(group));
        assert_eq!((tensor.min_ctas, tensor.max_ctas), (Some(4), Some(16)));
        assert_eq!(
            (data.max_ctas, data.high_priority_stream),
            (Some(8), Some(false))
        );
        assert_eq!(config.registered_buffers, Some(RegisteredBuffers::Windows));
        assert!(config.eager_init);
    }

    #[test]
    fn flags_without_the_engine_are_refused() {
        for flag in [
            "--nccl.groups.tensor.max_ctas 16",
            "--nccl.registered_buffers windows",
            "--nccl.eager_init",
        ] {
            let args: PretrainArgs = parse_text(flag).unwrap();
            let refused = set_up(&args.ranks, &args.settings, DeviceKind::Cpu, 1)
                .err()
                .unwrap();
            let expected = "requires processes with --engine nccl: remove it";
            let name = flag.split(' ').next().unwrap();
            assert_eq!(refused.to_string(), format!("{name} {expected}"));
        }
    }

    /// A recipe works with any engine, and unused settings are reported.
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
        insta::assert_snapshot!(error, @"invalid nccl.groups.data.max_ctas = 65: expected 1 to 64");
    }
}
