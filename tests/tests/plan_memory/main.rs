//! Tests that the memory planned from shapes equals the heap of the process.

mod published;
mod requests;
mod scale;
mod step;

use std::sync::Arc;

use burn::tensor::{DType, Device, Int, Tensor};
use burn_megatron::comm::ParallelContext;
use burn_megatron::data_parallel::{DataParallelConfig, DistributedDataParallel};
use burn_megatron::mesh::{Mesh, ParallelConfig, ScheduleKind};
use burn_megatron::model::{LanguageModel, ModelConfig};
use burn_megatron::nn::context::SequenceShard;
use burn_megatron::nn::moe::{DispatcherKind, Fp8DispatchScales};
use burn_megatron::nn::{LossFactor, ModelBuilder, QkNorm, Tokens};
use burn_megatron_models::{MlaConfig, MoeConfig, MtpConfig, TransformerConfig};
use burn_megatron_plan::memory::plan_memory;
use burn_megatron_plan::recorded_step::{ProfileRequest, profile_rank};
use burn_megatron_tests::heap::{self, CountingAllocator, ThreadHeap};
use burn_megatron_tests::{small_gpt, small_llama};

use requests::{ROWS, Settings};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator(std::alloc::System);

/// The bytes of one micro-batch on a rank with one stage.
#[derive(Clone, Copy, Debug)]
struct MicroBatch {
    /// The bytes that are alive between the forward and the backward pass.
    kept: f64,
    /// The peak, in addition to the bytes before the forward pass.
    peak: f64,
}

/// Measures the sum over the ranks. The ranks synchronize before and after the measurement, since a rank may free
/// memory that another rank has allocated.
fn measured(config: &TransformerConfig, mesh: &ParallelConfig, ranks: usize) -> MicroBatch {
    let seq = config.context;
    let run = |rank, heap: ThreadHeap| {
        let groups = ParallelContext::new(mesh, &rank)?;
        let device = Device::flex();
        let model = config.init_with(ModelBuilder::with(&groups, &device, 3, DType::F32))?;
        let settings = DataParallelConfig::default();
        let ddp = DistributedDataParallel::with(model, &groups, &settings)?;
        let shard = shard(&groups, [ROWS, seq]);
        let shape = shard.as_ref().map_or([ROWS, seq], |it| it.local_shape());
        let ids: Vec<i32> = (0..shape[0] * shape[1])
            .map(|i| (i * 7919 % 509) as i32)
            .collect();
        let mut found = (0.0, 0.0);
        // The first pass creates permanent memory: gradients and pools.
        for _ in 0..2 {
            groups.world().barrier()?;
            let before = heap.live();
            heap.reset_peak();
            groups.world().barrier()?;
            let loss = ddp.forward(&device, |model| {
                let inputs = device.clone().autodiff();
                let mut tokens = Tokens::new(&ids, shape, &inputs);
                tokens.shard = shard.clone();
                let targets = Tensor::<2, Int>::ones(shape, &inputs);
                let hidden = model.hidden(0, None, tokens);
                model
                    .loss_sums_of(hidden, targets, &LossFactor::Number(1.0))
                    .objective
            });
            groups.world().barrier()?;
            let kept = heap.live() - before;
            groups.world().barrier()?;
            ddp.backward(loss);
            groups.world().barrier()?;
            found = (kept as f64, (heap.peak() - before) as f64);
        }
        Ok(found)
    };
    let found = heap::on_ranks(ranks, run);
    MicroBatch {
        kept: found.iter().map(|(kept, _)| kept).sum(),
        peak: found.iter().map(|(_, peak)| peak).sum(),
    }
}

fn shard(groups: &ParallelContext, shape: [usize; 2]) -> Option<Arc<SequenceShard>> {
    let place = (groups.context().rank(), groups.context().size());
    let split = groups.config().context_split;
    (place.1 > 1).then(|| SequenceShard::new(shape, None, split, place).unwrap())
}

/// Returns the planned sum over the ranks.
fn planned(config: &TransformerConfig, layout: &ParallelConfig, ranks: usize) -> MicroBatch {
    let mesh = Mesh::new(layout, ranks).unwrap();
    let of_rank = |rank| {
        let groups = ParallelContext::offline(mesh.clone(), rank).unwrap();
        let profile = profile_rank(config, &Settings::default().profile(config, &groups));
        let [(_, stage)] = &profile.unwrap().stages[..] else {
            panic!("one stage")
        };
        if rank == 0 && std::env::var_os("PLAN_DETAILS").is_some() {
            for (layer, count) in stage.all() {
                println!("{count} x {} bytes", layer.saved_bytes());
                for tensor in &layer.saved {
                    println!("    {} {}", tensor.bytes, tensor.name);
                }
            }
        }
        [
            stage.saved_bytes(),
            stage.forward_bytes.max(stage.backward_bytes),
        ]
    };
    let all: Vec<[u64; 2]> = (0..ranks).map(of_rank).collect();
    let sum = |index: usize| all.iter().map(|it| it[index] as f64).sum();
    MicroBatch {
        kept: sum(0),
        peak: sum(1),
    }
}

/// Returns a model that is large enough to make the graph nodes small compared with the tensors.
fn llama() -> TransformerConfig {
    TransformerConfig {
        vocabulary: 512,
        context: 256,
        hidden: 128,
        layers: 2,
        mlp_width: Some(256),
        dropout: 0.0,
        ..small_llama().config
    }
}

fn experts() -> TransformerConfig {
    TransformerConfig {
        moe: Some(MoeConfig {
            experts: 4,
            ..MoeConfig::default()
        }),
        ..llama()
    }
}

fn gpt() -> TransformerConfig {
    TransformerConfig {
        vocabulary: 512,
        context: 256,
        hidden: 128,
        layers: 2,
        ..small_gpt().config
    }
}

fn close(planned: f64, measured: f64, tolerance: f64) -> bool {
    (planned - measured).abs() <= tolerance * measured
}

/// The plan computes one of several pipeline ranks with the same kinds of layers. Its profile must equal the profile
/// of each rank.
#[test]
fn ranks_that_are_planned_once_are_alike() {
    let config = TransformerConfig {
        layers: 8,
        moe: Some(MoeConfig {
            experts: 4,
            first_dense: 3,
            ..MoeConfig::default()
        }),
        ..llama()
    };
    let layout = ParallelConfig::new().with_pipeline(4);
    let settings = Settings::default();
    let report = plan_memory(&config, &settings.memory(&config, &layout, 4)).unwrap();
    let mesh = Mesh::new(&layout, 4).unwrap();
    for (rank, planned) in report.stages.iter().enumerate() {
        let groups = ParallelContext::offline(mesh.clone(), rank).unwrap();
        let request = ProfileRequest {
            input: [ROWS, config.context, config.hidden],
            ..settings.profile(&config, &groups)
        };
        let own = profile_rank(&config, &request);
        assert_eq!(own.unwrap().stages, [(rank, planned.clone())]);
    }
    // The stages have dense layers, both kinds of layers, and experts.
    assert_ne!(report.stages[1], report.stages[2]);
    assert!(report.states[1].parameters < report.states[2].parameters);
}

/// Each stage of a V-shaped pipeline receives the rows that the previous stage sends. The first rank also has the
/// last stage, which has more rows with multi-token prediction.
#[test]
fn a_stage_receives_the_rows_of_the_stage_before() {
    let config = TransformerConfig {
        layers: 8,
        mtp: Some(MtpConfig::default()),
        ..llama()
    };
    for context in [1, 2] {
        let layout = ParallelConfig::new().with_pipeline(2).with_context(context);
        let layout = layout
            .with_schedule(ScheduleKind::ZbV)
            .with_virtual_stages(2);
        let settings = Settings::default();
        let request = settings.memory(&config, &layout, 2 * context);
        let report = plan_memory(&config, &request).unwrap();
        let bytes = (ROWS * config.context / context * config.hidden * 4) as u64;
        let received: Vec<_> = report
            .stages
            .iter()
            .map(|stage| stage.input_bytes)
            .collect();
        assert_eq!(received, [0, bytes, bytes, bytes], "context {context}");
    }
}

/// If layers repeat, only a few of them are recorded. The plan equals the plan of a recording of all layers.
#[test]
fn layers_that_repeat_are_planned_as_if_all_were_recorded() {
    let config = TransformerConfig {
        layers: 12,
        ..llama()
    };
    let groups = ParallelContext::single();
    let profile = |freeze: &[String]| {
        let settings = Settings::default();
        let request = ProfileRequest {
            freeze,
            ..settings.profile(&config, &groups)
        };
        let mut stages = profile_rank(&config, &request).unwrap().stages;
        let stage = stages.swap_remove(0).1;
        let layers: usize = stage.layers.iter().map(|(_, count)| count).sum();
        let peaks = (stage.forward_bytes, stage.backward_bytes);
        (layers, peaks, stage.saved_bytes(), stage.deferred_bytes)
    };
    // With a pattern, settings depend on the position of a layer, even if nothing matches the pattern.
    assert_eq!(profile(&[]), profile(&["none".into()]));
}

/// A product packs its factors in buffers whose size depends on the caches. Other threads use memory too.
#[test]
fn a_thread_has_the_memory_of_its_tensors_alone() {
    let heap = ThreadHeap::begin();
    let x = Tensor::<2>::ones([512, 512], &Device::flex());
    let other = std::thread::spawn(|| Tensor::<2>::ones([512, 512], &Device::flex()));
    let other = other.join().unwrap();
    let (matrix, slack) = (4 * 512 * 512, 1 << 16);
    assert!((matrix..matrix + slack).contains(&heap.live()), "{heap:?}");
    let product = x.matmul(other);
    // At most the result and a copy of a factor.
    let most = heap.peak();
    assert!((2 * matrix..3 * matrix + slack).contains(&most), "{most}");
    drop(product);
    assert!(heap.live() < slack, "{}", heap.live());
}

#[test]
fn what_a_micro_batch_keeps_is_what_the_heap_has() {
    let one = ParallelConfig::new();
    let tensor = one.clone().with_tensor(2);
    let sequence = tensor.clone().with_sequence_parallel(true);
    let unmasked = TransformerConfig {
        dropout: 0.0,
        attention_dropout: 0.0,
        ..gpt()
    };
    let gemma = TransformerConfig {
        attention_soft_cap: Some(5.0),
        logit_soft_cap: Some(5.0),
        post_norms: true,
        scaled_embedding: true,
        ..llama()
    };
    let sinks = TransformerConfig {
        sinks: true,
        qk_norm: Some(QkNorm::Whole),
        ..llama()
    };
    let latent = TransformerConfig {
        groups: None,
        mla: Some(MlaConfig {
            q_rank: Some(48),
            kv_rank: 32,
            nope_width: 32,
            rope_width: 16,
            value_width: 24,
            norm_epsilon: 1e-6,
        }),
        ..llama()
    };
    let shared = TransformerConfig {
        moe: experts().moe.map(|moe| MoeConfig {
            shared_width: Some(128),
            shared_gate: true,
            ..moe
        }),
        ..experts()
    };
    let flex = TransformerConfig {
        moe: experts().moe.map(|moe| MoeConfig {
            dispatcher: DispatcherKind::Flex,
            fp8_dispatch: Some(Fp8DispatchScales::E8m0),
            ..moe
        }),
        ..experts()
    };
    let cases = [
        ("latents", latent.clone(), one.clone(), 1),
        ("latents, tensor 2", latent.clone(), tensor.clone(), 2),
        ("latents, context 2", latent, one.clone().with_context(2), 2),
        ("soft caps and norms of outputs", gemma, one.clone(), 1),
        ("sinks, tensor 2", sinks.clone(), tensor.clone(), 2),
        ("sinks, context 2", sinks, one.clone().with_context(2), 2),
        ("llama", llama(), one.clone(), 1),
        ("llama, tensor 2", llama(), tensor.clone(), 2),
        ("llama, sequence parallel 2", llama(), sequence.clone(), 2),
        ("gpt with dropout", gpt(), one.clone(), 1),
        ("gpt without dropout", unmasked, one.clone(), 1),
        ("experts", experts(), one.clone(), 1),
        ("a shared expert with a gate", shared, one.clone(), 1),
        (
            "experts on 2 ranks",
            experts(),
            one.clone().with_data(2).with_expert(2),
            2,
        ),
        (
            "experts on 2 ranks, tokens sent in 8 bits",
            flex,
            one.clone().with_data(2).with_expert(2),
            2,
        ),
        ("context 2", llama(), one.with_context(2), 2),
        ("gpt, sequence parallel 2", gpt(), sequence, 2),
    ];
    let mut wrong = vec![];
    for (name, config, layout, ranks) in cases {
        let (plan, heap) = (
            planned(&config, &layout, ranks),
            measured(&config, &layout, ranks),
        );
        println!(
            "{name}: kept {} planned, {} measured ({:.3}); peak {} planned, {} measured ({:.3})",
            plan.kept,
            heap.kept,
            plan.kept / heap.kept,
            plan.peak,
            heap.peak,
            plan.peak / heap.peak,
        );
        // The threads engine has its own buffers, and copies the tensors that it sends.
        let of_peak = if ranks == 1 { 0.05 } else { 0.15 };
        if !close(plan.kept, heap.kept, 0.05) || !close(plan.peak, heap.peak, of_peak) {
            wrong.push(name);
        }
    }
    assert!(wrong.is_empty(), "planned and measured differ: {wrong:?}");
}
