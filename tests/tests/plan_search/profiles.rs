//! Compares the profiles of published models with published numbers.

use burn_megatron::mesh::ParallelConfig;
use burn_megatron::mesh::stages::StageLayout;
use burn_megatron::nn::moe::{DispatchNodes, DispatchProblem, DispatcherKind, Fp8DispatchScales};
use burn_megatron_models::{MoeConfig, TransformerConfig};
use burn_megatron_plan::profile::{Exchange, GroupPart, TrainingPass};
use burn_megatron_plan::{Recompute, fit, sent_bytes};

use super::models::{deepseek_v3, gpt, llama_8b, llama_70b, llama_405b, qwen_30b, qwen_235b};

fn whole(config: &TransformerConfig) -> u64 {
    let model = config.profile(&ParallelConfig::new(), 1, 16);
    let stage = StageLayout {
        embedding: true,
        layers: 0..config.layers,
        loss: true,
    };
    let parameters = model.parameters([&stage]);
    parameters.dense + parameters.expert
}

#[test]
fn parameters_are_the_published_ones() {
    assert_eq!(whole(&llama_8b()), 8_030_261_248);
    assert_eq!(whole(&llama_70b()), 70_553_706_496);
    assert_eq!(whole(&llama_405b()), 405_853_388_800);
    assert_eq!(whole(&qwen_30b()), 30_532_122_624);
    assert_eq!(whole(&qwen_235b()), 235_093_634_560);
    assert_eq!(whole(&deepseek_v3()), 671_026_404_352);
    assert_eq!(whole(&gpt(12288, 96, 96, 50257, 2048)), 174_604_259_328);
}

/// The operations of a layer in the profile of a rank are its share of the model's operations.
#[test]
fn the_products_of_all_ranks_are_those_of_the_model() {
    for (config, seq) in [
        (llama_70b(), 8192),
        (qwen_30b(), 4096),
        (deepseek_v3(), 4096),
    ] {
        for (tensor, context) in [(1, 1), (4, 1), (2, 2)] {
            if config.mla.is_some() && context > 1 {
                // Each context rank projects the keys and values of all tokens.
                continue;
            }
            let layout = ParallelConfig::new()
                .with_tensor(tensor)
                .with_context(context)
                .with_expert_tensor(1)
                .with_sequence_parallel(tensor > 1);
            let model = config.profile(&layout, 1, seq);
            let layers = model
                .layers
                .iter()
                .map(|kind| model.kinds[*kind].layer.flops());
            let mut of_rank = layers.sum::<f64>() + model.output.layer.flops();
            if let Some(moe) = &config.moe {
                // Routers are not counted.
                let routers = (0..config.layers).filter(|number| moe.is_in(*number));
                let routers = routers.count() as f64 * 2.0 * (config.hidden * moe.experts) as f64;
                of_rank -= routers * seq as f64 / (tensor * context) as f64;
            }
            let all = 3.0 * of_rank * (tensor * context) as f64 / seq as f64;
            let expected = config.flops_per_token(seq);
            assert!((all / expected - 1.0).abs() < 1e-9, "{all} and {expected}");
        }
    }
}

/// Tests the bytes per token in a layer of Llama 3, and the bytes that remain with each kind of recomputation.
#[test]
fn activations_are_the_known_ones() {
    let kept = |config: &TransformerConfig, tensor, recompute| {
        let layout = ParallelConfig::new()
            .with_tensor(tensor)
            .with_sequence_parallel(tensor > 1);
        let model = config.profile(&layout, 1, 8192);
        fit::kept_bytes(&model.kinds[0].layer, recompute)
    };
    let none = |config: &TransformerConfig| kept(config, 1, Recompute::None) / 8192;
    assert_eq!(none(&llama_8b()), 139_264);
    assert_eq!(none(&llama_70b()), 274_432);
    assert_eq!(none(&llama_405b()), 520_192);
    let mib = |config: &TransformerConfig| kept(config, 8, Recompute::None) >> 20;
    assert_eq!(
        [mib(&llama_8b()), mib(&llama_70b()), mib(&llama_405b())],
        [136, 268, 508]
    );
    let (h, q, kv, f) = (4096, 4096, 1024, 14336);
    let selective = kept(&llama_8b(), 1, Recompute::Selective);
    assert_eq!(selective / 8192, 4 * h + 4 * q + 4 * kv + 4 * f);
    assert_eq!(kept(&llama_8b(), 1, Recompute::Full) / 8192, 2 * h);
}

/// Llama 3 70B with tensor 4 and pipeline 8: the mean number of parameters per rank, and the bytes that sequence
/// parallelism sends in the forward pass.
#[test]
fn volumes_are_the_known_ones() {
    let layout = ParallelConfig::new()
        .with_tensor(4)
        .with_sequence_parallel(true);
    let model = llama_70b().profile(&layout, 1, 8192);
    let stage = StageLayout {
        embedding: true,
        layers: 0..80,
        loss: true,
    };
    let mean = model.parameters([&stage]).dense as f64 / 8.0;
    assert!((mean / 2.2048e9 - 1.0).abs() < 1e-4, "{mean}");
    let exchanges = model.kinds[0].layer.exchanges.iter();
    let forward = exchanges.filter(|e| e.pass == TrainingPass::Forward);
    let sent: f64 = forward.map(|e| sent_bytes(e.kind, e.bytes as f64, 4)).sum();
    assert_eq!((sent / 1e5).round() / 10.0, 402.7);
}

/// Returns the bytes of the expert exchanges that a rank sends in each pass, in total and between nodes.
fn sent_for_experts(
    dispatcher: DispatcherKind,
    fp8_dispatch: Option<Fp8DispatchScales>,
    ranks_per_node: Option<usize>,
) -> [[f64; 2]; 2] {
    let qwen = qwen_30b();
    let moe = qwen.moe.clone().map(|moe| MoeConfig {
        dispatcher,
        fp8_dispatch,
        ..moe
    });
    let mut layout = ParallelConfig::new().with_data(8).with_expert(8);
    layout.ranks_per_node = ranks_per_node;
    let model = TransformerConfig { moe, ..qwen }.profile(&layout, 1, 4096);
    let exchanges = &model.kinds[0].layer.exchanges;
    [TrainingPass::Forward, TrainingPass::Backward].map(|pass| {
        let of_pass = exchanges.iter().filter(move |e| e.pass == pass);
        let between = |e: &&Exchange| !matches!(e.part, GroupPart::IntraNode(_));
        let sent = |e: &Exchange| sent_bytes(e.kind, e.bytes as f64, e.ranks as usize);
        [
            of_pass.clone().map(sent).sum(),
            of_pass.filter(between).map(sent).sum(),
        ]
    })
}

/// The formulas of the dispatchers have their own tests. A token with 8 of 128 experts on 8 ranks is sent to 5.339
/// ranks.
#[test]
fn dispatchers_send_what_their_formulas_say() {
    let (tokens, hidden) = (4096usize, 2048usize);
    let row = (2 * hidden) as f64;
    let all = tokens as f64 * 8.0 * 7.0 / 8.0 * 2.0 * row;
    for kind in [DispatcherKind::AllToAll, DispatcherKind::AllGather] {
        // From k = R on, the number of rows is the same.
        assert_eq!(sent_for_experts(kind, None, None), [[all; 2]; 2]);
    }
    for (fp8, ranks_per_node) in [
        (None, None),
        (Some(Fp8DispatchScales::E8m0), None),
        (None, Some(4)),
    ] {
        let problem = DispatchProblem {
            dispatcher: DispatcherKind::Flex,
            fp8,
            tokens,
            experts: 128,
            per_token: 8,
            groups: None,
            hidden,
            expert: 8,
            expert_tensor: 1,
            nodes: ranks_per_node.map(|ranks| DispatchNodes { ranks, experts: 64 }),
        };
        let passes = [problem.forward_bytes(2, 4), problem.backward_bytes(2, 4)];
        let found = sent_for_experts(DispatcherKind::Flex, fp8, ranks_per_node);
        for (found, expected) in found.iter().zip(passes) {
            let between = match ranks_per_node {
                Some(_) => expected.between,
                None => expected.inside,
            };
            for (found, expected) in found.iter().zip([expected.total(), between]) {
                assert!(
                    (found / expected - 1.0).abs() < 1e-6,
                    "{found}, not {expected}"
                );
            }
        }
        if fp8.is_none() && ranks_per_node.is_none() {
            let share = found[0][0] / all;
            assert!((share - 5.339 / 8.0).abs() < 0.02, "{share}");
        }
    }
}
