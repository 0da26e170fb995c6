//! The keys of the recipe in the help of `pretrain`, with their defaults.

use clap::builder::StyledStr;
use clap::{Arg, Command};
use toml::Value;

use crate::recipe::Recipe;

/// The flags that override a key of the recipe, and the key.
const KEYS: &[(&str, &str)] = &[
    ("data", "data.path"),
    ("tokenizer", "data.tokenizer"),
    ("split", "data.split"),
    ("data_cache", "data.cache"),
    ("tensor_parallel", "parallel.tensor"),
    ("data_parallel", "parallel.data"),
    ("sequence_parallel", "parallel.sequence_parallel"),
    ("tp_comm_overlap", "parallel.tp_comm_overlap"),
    (
        "tp_comm_overlap_num_splits",
        "parallel.tp_comm_overlap_num_splits",
    ),
    ("context_parallel", "parallel.context"),
    ("context_exchange", "parallel.context_exchange"),
    (
        "hybrid_context_parallel",
        "parallel.hybrid_context_parallel",
    ),
    (
        "max_seqlen_per_dp_cp_rank",
        "parallel.max_seqlen_per_dp_cp_rank",
    ),
    ("expert_parallel", "parallel.expert"),
    ("expert_tensor_parallel", "parallel.expert_tensor"),
    (
        "overlap_moe_expert_parallel_comm",
        "parallel.overlap_moe_expert_parallel_comm",
    ),
    ("ranks_per_node", "parallel.ranks_per_node"),
    ("pipeline_parallel", "parallel.pipeline"),
    ("virtual_stages", "parallel.virtual_stages"),
    ("pipeline_schedule", "parallel.schedule"),
    ("defer_embedding_wgrad", "parallel.defer_embedding_wgrad"),
    ("receives_ahead", "parallel.receives_ahead"),
    ("fp8_transfers", "parallel.fp8_transfers"),
    ("micro_batch_size", "train.micro_batch_size"),
    ("global_batch_size", "train.global_batch_size"),
    ("prompt", "sample.prompt"),
    ("steps", "train.steps"),
    ("lr", "train.learning_rate"),
    ("clip", "train.clip"),
    ("seed", "train.seed"),
    ("check_replicas_every", "train.check_replicas_every"),
    ("check_replay", "train.check_replay_every"),
    ("deterministic", "train.deterministic"),
    ("cuda_graph", "train.cuda_graph"),
    ("log_num_zeros_in_grad", "train.log_num_zeros_in_grad"),
    ("qk_clip", "train.qk_clip"),
    ("qk_clip_threshold", "train.qk_clip.threshold"),
    ("qk_clip_alpha", "train.qk_clip.alpha"),
    ("log_max_attention_logit", "train.log_max_attention_logit"),
    ("zero_stage", "data_parallel.zero_stage"),
    ("hsdp", "data_parallel.hsdp"),
    ("hierarchical_reduce", "data_parallel.hierarchical_reduce"),
    ("overlap_grad_reduce", "data_parallel.overlap_grad_reduce"),
    ("overlap_param_gather", "data_parallel.overlap_param_gather"),
    ("bucket_size", "data_parallel.bucket_size"),
    ("keep_gathered", "data_parallel.keep_gathered"),
    ("reduce_in_16_bits", "data_parallel.reduce_in_16_bits"),
    ("gradient_limit", "data_parallel.gradient_limit"),
    ("fp8_param_gather", "data_parallel.fp8_param_gather"),
    ("precision", "data_parallel.precision"),
    ("loss_scale", "train.loss_scale"),
    ("fp8", "fp8.recipe"),
    ("fp8_format", "fp8.format"),
    ("first_last_bf16", "fp8.first_last_bf16"),
    ("fp8_save_activations", "fp8.save_activations"),
    ("recompute_granularity", "memory.recompute.granularity"),
    ("recompute_method", "memory.recompute.method"),
    ("recompute_num_layers", "memory.recompute.layers"),
    ("recompute_modules", "memory.recompute.modules"),
    ("offload_optimizer", "memory.offload.optimizer"),
    ("offload_activations", "memory.offload.activations"),
    ("offload_prefetch", "memory.offload.prefetch"),
    ("nccl_eager_init", "nccl.eager_init"),
    ("nccl_group", "nccl.groups"),
    ("nccl_registered", "nccl.registered_buffers"),
    ("save_every", "checkpoint.every"),
    ("keep_last", "checkpoint.keep_last"),
    ("keep_every", "checkpoint.keep_every"),
    ("async_save", "checkpoint.asynchronous"),
    ("no_save", "checkpoint.save"),
    ("load", "checkpoint.load"),
    ("kernels", "kernels"),
    ("loss_chunk_size", "kernels.loss_chunk_size"),
    ("micro_batches", "train.micro_batch_size"),
];

/// Adds to the help of `pretrain` which key of the recipe a flag overrides, and the value in the recipe that runs by
/// default, if it has one: `[recipe: train.steps = 200]`.
pub fn with_keys(command: Command, recipe: &Recipe) -> Command {
    let Ok(recipe) = Value::try_from(recipe) else {
        return command; // `pretrain` says why
    };
    command.mut_subcommand("pretrain", |pretrain| {
        pretrain.mut_args(
            |arg| match KEYS.iter().find(|(flag, _)| arg.get_id() == flag) {
                Some((_, key)) => with_note(arg, &note(&recipe, key)),
                None => arg,
            },
        )
    })
}

/// The key and its value in a recipe.
fn note(recipe: &Value, key: &str) -> String {
    match value(recipe, key) {
        Some(value) => format!(" [recipe: {key} = {value}]"),
        None => format!(" [recipe: {key}]"),
    }
}

/// Appends a note to the help of a flag.
fn with_note(mut arg: Arg, note: &str) -> Arg {
    let noted = |help: &StyledStr| format!("{help}{note}");
    if let Some(help) = arg.get_long_help().map(noted) {
        arg = arg.long_help(help);
    }
    match arg.get_help().map(noted) {
        Some(help) => arg.help(help),
        None => arg,
    }
}

/// The value of a key, in TOML; `None` for a table.
fn value(recipe: &Value, key: &str) -> Option<String> {
    let value = key.split('.').try_fold(recipe, |table, key| table.get(key));
    let value = value.filter(|value| !value.is_table())?;
    Some(value.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use crate::recipe::{DEFAULT_RECIPE, parsed};
    use clap::CommandFactory;

    #[test]
    fn flags_have_the_keys_and_defaults_of_the_recipe() {
        let recipe = parsed(DEFAULT_RECIPE).unwrap();
        let mut command = with_keys(Cli::command(), &recipe);
        command.build();
        let pretrain = command.find_subcommand_mut("pretrain").unwrap();
        let help = pretrain.clone().term_width(200).render_help().to_string();
        for note in [
            "[recipe: parallel.tensor = 2]",
            "[recipe: data_parallel.precision = \"f32\"]",
            "[recipe: data_parallel.bucket_size]",
        ] {
            assert!(help.contains(note), "{note} in {help}");
        }
        assert!(help.find("Data:") < help.find("Parallelism:"), "{help}");
        let arguments = pretrain.get_arguments();
        let arguments: Vec<_> = arguments.map(|arg| arg.get_id().as_str()).collect();
        for (flag, key) in KEYS {
            assert!(arguments.contains(flag), "{flag}");
            // No key has a date, and an unknown one is refused as such.
            let error = parsed(&format!("{key} = 1979-05-27"))
                .unwrap_err()
                .to_string();
            let is_unknown = |name: &str| error.contains(&format!("unknown field `{name}`"));
            assert!(!key.split('.').any(is_unknown), "{key}: {error}");
        }
    }

    /// Lists of flags are read in groups.
    #[test]
    fn every_flag_of_pretrain_has_a_heading() {
        let command = Cli::command();
        let pretrain = command.find_subcommand("pretrain").unwrap();
        let without = pretrain.get_arguments();
        let without = without.filter(|arg| arg.get_help_heading().is_none() && !arg.is_hide_set());
        let without: Vec<_> = without.map(|arg| arg.get_id().as_str()).collect();
        assert!(without.len() < 10, "{without:?}");
    }
}
