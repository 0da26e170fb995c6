//! DeepSeek-V2 and V3, as keys of a `config.json`.

use burn_megatron::nn::NormKind;
use burn_megatron::nn::moe::{ExpertGroups, GroupScore, RouterChoice, ScoreFunction};
use serde_json::{Map, Value, json};

use super::read::{GATED, activation, init_std};
use super::write::{map, name_of};
use super::{ModelFamily, experts, gemma, rope};
use crate::hf::{ConfigKeys, HfConfigError};
use crate::{MlaConfig, MoeConfig, MtpConfig, Positions, RotaryScaling, TransformerConfig};

/// The epsilon of the norms of latents, which no key sets.
const LATENT_EPSILON: f64 = 1e-6;

/// The experts of a group whose scores count in V3.
const OF_GROUP: GroupScore = GroupScore::SumOf(2);

/// The routing of a family: the value of `scoring_func`, and of `topk_method` with groups.
struct Routing {
    name: &'static str,
    score: ScoreFunction,
    with_groups: &'static str,
    group: GroupScore,
}

fn routing(family: ModelFamily) -> Routing {
    match family {
        ModelFamily::DeepseekV3 => Routing {
            name: "sigmoid",
            score: ScoreFunction::Sigmoid,
            with_groups: "noaux_tc",
            group: OF_GROUP,
        },
        _ => Routing {
            name: "softmax",
            score: ScoreFunction::PreSoftmax,
            with_groups: "group_limited_greedy",
            group: GroupScore::Max,
        },
    }
}

pub(super) fn read(
    family: ModelFamily,
    keys: &mut ConfigKeys,
) -> Result<TransformerConfig, HfConfigError> {
    let heads = keys.needed("num_attention_heads", ConfigKeys::size)?;
    let context = keys.needed("max_position_embeddings", ConfigKeys::size)?;
    let mla = latents(keys)?;
    // Each head has keys and values of its own, of which the rotated part counts as the width.
    keys.only("num_key_value_heads", heads)?;
    keys.only("head_dim", mla.rope_width)?;
    keys.only("qk_head_dim", mla.head_width())?;
    // Only the order of the computation depends on it.
    keys.take("pretraining_tp");
    keys.only("attention_bias", false)?;
    keys.only("mlp_bias", false)?;
    keys.not_null(
        "rope_interleave",
        "true, as transformers reads null as false",
    )?;
    keys.only("rope_interleave", true)?;
    // By its old or new name.
    let depths = keys.count("num_nextn_predict_layers")?;
    let depths = keys.count("num_mtp_layers")?.or(depths).unwrap_or(0);
    Ok(TransformerConfig {
        vocabulary: keys.needed("vocab_size", ConfigKeys::size)?,
        context,
        hidden: keys.needed("hidden_size", ConfigKeys::size)?,
        layers: keys.needed("num_hidden_layers", ConfigKeys::size)?,
        heads,
        groups: None,
        mlp_width: Some(keys.needed("intermediate_size", ConfigKeys::size)?),
        norm_epsilon: keys.needed("rms_norm_eps", ConfigKeys::number)?,
        activation: activation(keys, "hidden_act", GATED)?,
        positions: rope::read(family, keys, context)?,
        tied: keys.needed("tie_word_embeddings", ConfigKeys::flag)?,
        attention_dropout: keys.number("attention_dropout")?.unwrap_or(0.0),
        init_std: init_std(keys)?,
        scaled_output_init: false,
        mla: Some(mla),
        moe: Some(routed(family, keys)?),
        mtp: (depths > 0).then(|| MtpConfig {
            layers: depths,
            ..MtpConfig::default()
        }),
        ..TransformerConfig::llama()
    })
}

fn latents(keys: &mut ConfigKeys) -> Result<MlaConfig, HfConfigError> {
    Ok(MlaConfig {
        q_rank: keys.size("q_lora_rank")?,
        kv_rank: keys.needed("kv_lora_rank", ConfigKeys::size)?,
        nope_width: keys.needed("qk_nope_head_dim", ConfigKeys::size)?,
        rope_width: keys.needed("qk_rope_head_dim", ConfigKeys::size)?,
        value_width: keys.needed("v_head_dim", ConfigKeys::size)?,
        norm_epsilon: LATENT_EPSILON,
    })
}

fn routed(family: ModelFamily, keys: &mut ConfigKeys) -> Result<MoeConfig, HfConfigError> {
    let routing = routing(family);
    // They belong to the loss of the routers and to the layout.
    for key in ["aux_loss_alpha", "seq_aux", "ep_size"] {
        keys.take(key);
    }
    keys.only("moe_layer_freq", 1)?;
    keys.only("scoring_func", routing.name)?;
    let is_v3 = family == ModelFamily::DeepseekV3;
    let per_token = keys.needed("num_experts_per_tok", ConfigKeys::size)?;
    if !is_v3 {
        // The class of transformers ignores the key, the code next to the published weights does not.
        keys.only("norm_topk_prob", false)?;
    }
    let normalised = keys.flag("norm_topk_prob")?.unwrap_or(false);
    let width = keys.needed("moe_intermediate_size", ConfigKeys::size)?;
    let shared = keys.needed("n_shared_experts", ConfigKeys::size)?;
    Ok(MoeConfig {
        experts: keys.needed("n_routed_experts", ConfigKeys::size)?,
        experts_per_token: per_token,
        normalized: is_v3
            .then(|| experts::normalized(per_token, normalised))
            .flatten(),
        expert_width: Some(width),
        first_dense: keys.needed("first_k_dense_replace", ConfigKeys::count)?,
        score: routing.score,
        factor: keys.needed("routed_scaling_factor", ConfigKeys::number)?,
        groups: groups(family, keys, &routing)?,
        // The biases stay as they are unless a recipe has a rate.
        bias_update_rate: is_v3.then_some(0.0),
        shared_width: Some(width * shared),
        ..MoeConfig::default()
    })
}

/// Returns the groups of experts, or `None` if all are chosen or V2's `topk_method` ignores them.
fn groups(
    family: ModelFamily,
    keys: &mut ConfigKeys,
    routing: &Routing,
) -> Result<Option<ExpertGroups>, HfConfigError> {
    let groups = keys.size("n_group")?;
    let chosen = keys.size("topk_group")?;
    if family == ModelFamily::DeepseekV3 {
        // The class of transformers does not read the key.
        keys.only("topk_method", routing.with_groups)?;
    } else {
        let method = keys.needed("topk_method", ConfigKeys::text)?;
        if method == "greedy" {
            return Ok(None);
        }
        if method != routing.with_groups {
            let fits = format!("greedy or {}", routing.with_groups);
            return Err(keys.refused("topk_method", &json!(method), fits));
        }
    }
    let groups = groups.ok_or_else(|| keys.missing("n_group"))?;
    let chosen = chosen.ok_or_else(|| keys.missing("topk_group"))?;
    if chosen > groups {
        let fits = format!("at most n_group = {groups}");
        return Err(keys.refused("topk_group", &json!(chosen), fits));
    }
    // Without a limit if all groups are chosen.
    Ok((chosen < groups).then_some(ExpertGroups {
        groups,
        chosen,
        score: routing.group,
    }))
}

/// Returns the conditions that a model of the family must meet.
pub(super) fn conditions(
    family: ModelFamily,
    model: &TransformerConfig,
) -> Vec<(&'static str, bool)> {
    let routing = routing(family);
    let is_v3 = family == ModelFamily::DeepseekV3;
    let has_both = match &model.positions {
        Positions::Rotary {
            scaling:
                RotaryScaling::Yarn {
                    mscale,
                    mscale_all_dim,
                    ..
                },
            ..
        } => *mscale_all_dim == 0.0 || *mscale != 0.0,
        Positions::Rotary { .. } => true,
        Positions::Learned => false,
    };
    let (Some(mla), Some(moe)) = (&model.mla, &model.moe) else {
        return vec![("mla and experts", false)];
    };
    let width = moe.width(model);
    vec![
        (
            "norm = rms without norm_zero_centered",
            model.norm == NormKind::Rms && !model.norm_zero_centered,
        ),
        (gemma::ABSENT, gemma::is_absent(model)),
        (
            "an activation with a gate that has a name",
            name_of(model.activation, false).is_some(),
        ),
        (
            "mla.norm_epsilon = 1e-6",
            mla.norm_epsilon == LATENT_EPSILON,
        ),
        (
            "rotary positions, and with YaRN mscale beside mscale_all_dim",
            has_both,
        ),
        (
            "experts chosen by scores alone, in every block after the first, without router_bias, capacity and shared_gate",
            moe.choice == RouterChoice::Scores
                && moe.every == 1
                && !moe.router_bias
                && !moe.shared_gate
                && moe.capacity.is_none(),
        ),
        (
            "shared_width = a multiple of expert_width",
            moe.shared_width
                .is_some_and(|shared| shared.is_multiple_of(width)),
        ),
        (
            "score = sigmoid, bias_update_rate and groups by a sum of 2, or score = pre-softmax, none, and by the maximum",
            moe.score == routing.score
                && moe.bias_update_rate.is_some() == is_v3
                && moe
                    .groups
                    .is_none_or(|groups| groups.score == routing.group),
        ),
        (
            "mtp with score = sigmoid alone",
            is_v3 || model.mtp.is_none(),
        ),
        (
            "normalized with score = sigmoid alone",
            is_v3 || moe.normalized.is_none(),
        ),
    ]
}

pub(super) fn write(family: ModelFamily, model: &TransformerConfig) -> Map<String, Value> {
    let routing = routing(family);
    let (Some(mla), Some(moe)) = (&model.mla, &model.moe) else {
        return Map::new();
    };
    let width = moe.width(model);
    let method = match moe.groups {
        None if family == ModelFamily::DeepseekV2 => "greedy",
        _ => routing.with_groups,
    };
    let mut keys = map(json!({
        "hidden_size": model.hidden,
        "intermediate_size": model.mlp_width(),
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.heads,
        "max_position_embeddings": model.context,
        "rms_norm_eps": model.norm_epsilon,
        "hidden_act": name_of(model.activation, false),
        "attention_dropout": model.attention_dropout,
        "attention_bias": false,
        "q_lora_rank": mla.q_rank,
        "kv_lora_rank": mla.kv_rank,
        "qk_nope_head_dim": mla.nope_width,
        "qk_rope_head_dim": mla.rope_width,
        "v_head_dim": mla.value_width,
    }));
    keys.extend(map(json!({
        "n_routed_experts": moe.experts,
        "n_shared_experts": moe.shared_width.unwrap_or(0) / width,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": width,
        "first_k_dense_replace": moe.first_dense,
        "moe_layer_freq": 1,
        "n_group": moe.groups.map_or(1, |groups| groups.groups),
        "topk_group": moe.groups.map_or(1, |groups| groups.chosen),
        "topk_method": method,
        "scoring_func": routing.name,
        "norm_topk_prob": family == ModelFamily::DeepseekV3 && moe.is_normalized(),
        "routed_scaling_factor": moe.factor,
    })));
    if family == ModelFamily::DeepseekV3 {
        let depths = model.mtp.as_ref().map_or(0, |mtp| mtp.layers);
        keys.insert("num_nextn_predict_layers".into(), json!(depths));
        keys.insert("rope_interleave".into(), json!(true));
    }
    rope::write(family, model, &mut keys);
    keys
}
