//! Tests that the memory that ranks report equals the heap of the process.

use std::sync::Mutex;

mod memory_report;

use burn::tensor::{DType, Device, Int, Tensor};
use burn_megatron::comm::{ParallelContext, Rank};
use burn_megatron::data_parallel::{
    DataParallelConfig, DistributedDataParallel, MemoryPlan, Precision, ZeroStage,
};
use burn_megatron::kernel_selection::KernelChoices;
use burn_megatron::kernels::attention::Heads;
use burn_megatron::mesh::{ContextExchange, ContextSplit, ParallelConfig};
use burn_megatron::model::{LanguageModel, ModelConfig, Tokens};
use burn_megatron::nn::RecomputeModule::{Activation, CoreAttention, Mlp, Norm};
use burn_megatron::nn::context::{ExchangeProblem, SequenceShard};
use burn_megatron::nn::{ModelBuilder, RecomputeConfig, RecomputeMethod};
use burn_megatron::optim::{AdamWConfig, ParallelAdamW};
use burn_megatron_models::TransformerConfig;
use burn_megatron_train::{NoopObserver, TrainConfig, Trainer};
use burn_megatron_verify::memory_report::HeapCounter;

use burn_megatron_tests::heap::{self, CountingAllocator, RankError, ThreadHeap};
use burn_megatron_tests::{Text, small_llama};

/// A report measures the heap of the whole process, so the tests run one at a time.
static ALONE: Mutex<()> = Mutex::new(());

#[global_allocator]
static ALLOCATOR: CountingAllocator<HeapCounter> = CountingAllocator(HeapCounter);

const RANKS: usize = 4;

/// Returns a configuration with about 3 million parameters.
fn config() -> TransformerConfig {
    TransformerConfig {
        vocabulary: 256,
        hidden: 256,
        layers: 4,
        mlp_width: Some(768),
        ..small_llama().config
    }
}

/// Returns the heap of the ranks between two steps, divided by the memory that they report.
fn ratio(settings: &DataParallelConfig) -> f64 {
    let mesh = ParallelConfig::new().with_data(RANKS);
    let config = config();
    let run = |rank, heap: ThreadHeap| {
        let groups = ParallelContext::new(&mesh, &rank)?;
        let device = Device::flex();
        let scope = ModelBuilder::with(&groups, &device, 3, DType::F32);
        let scope = scope.with_compute_dtype(settings.precision.of(DType::F32));
        let model = config.init_with(scope)?;
        let mut ddp = DistributedDataParallel::with(model, &groups, settings)?;
        let mut optimizer = ParallelAdamW::new(&AdamWConfig::default(), &ddp)?;
        for _ in 0..2 {
            let inputs = device.clone().autodiff();
            let tokens = Tensor::<2, Int>::zeros([1, config.context], &inputs);
            let loss = ddp.forward(&device, |model| model.losses(tokens.clone(), tokens).sum());
            ddp.backward_last(loss);
            let gradients = ddp.reduce(1)?;
            optimizer.step(0.001, &mut ddp, gradients);
        }
        // All ranks are between two steps.
        groups.world().barrier()?;
        let pool = groups.data().pool().map(|pool| pool.free_bytes());
        let live = heap.live();
        groups.world().barrier()?;
        let now: MemoryPlan = ddp.usage().now();
        Ok((live, now.total() + pool.unwrap_or_default()))
    };
    let ranks = heap::on_ranks(RANKS, run);
    let live: usize = ranks.iter().map(|(live, _)| live).sum();
    let said: u64 = ranks.iter().map(|(_, said)| said).sum();
    live as f64 / said as f64
}

/// Returns the maximum growth of the heap in bytes, in the second step of a trainer. `loss_chunk_size` is the number
/// of tokens per chunk of the loss.
fn peak_of_a_step(
    model: &TransformerConfig,
    micro_batches: usize,
    loss_chunk_size: usize,
) -> usize {
    let config = TrainConfig {
        micro_batch_size: 2,
        global_batch_size: 2 * micro_batches,
        ..TrainConfig::default()
    };
    let text = Text::new();
    let samples = text.open().samples(model.context, 1).unwrap();
    let kernels = KernelChoices {
        loss_chunk_size: Some(loss_chunk_size),
        ..KernelChoices::default()
    };
    let run = |_, heap: ThreadHeap| {
        let groups = ParallelContext::single();
        let scope = ModelBuilder::new(&groups, &Device::flex());
        let model = model.init_with(scope.with_kernels(&kernels)?)?;
        let mut trainer = Trainer::new(model, &groups, &Device::flex(), &config)?;
        trainer.step(&samples, &mut NoopObserver)?;
        let before = heap.live();
        heap.reset_peak();
        trainer.step(&samples, &mut NoopObserver)?;
        Ok(heap.peak() - before)
    };
    heap::on_ranks(1, run)[0]
}

/// Returns a Llama whose activations are larger than its weights.
fn wide_batch(layers: usize) -> TransformerConfig {
    TransformerConfig {
        vocabulary: 32,
        context: 128,
        hidden: 64,
        layers,
        heads: 4,
        groups: Some(2),
        mlp_width: Some(192),
        dropout: 0.0,
        ..config()
    }
}

/// The number of samples per micro-batch of this model.
const SAMPLES: usize = 4;

/// Returns the number of bytes that a forward pass keeps for the backward pass.
fn kept(model: &TransformerConfig, kernels: &KernelChoices, recompute: &RecomputeConfig) -> usize {
    let run = |_, heap: ThreadHeap| {
        let (groups, device) = (ParallelContext::single(), Device::flex());
        let scope = ModelBuilder::new(&groups, &device)
            .with_kernels(kernels)?
            .with_recompute(recompute)?;
        let settings = DataParallelConfig::default();
        let built = model.init_with(scope)?;
        let mut ddp = DistributedDataParallel::with(built, &groups, &settings)?;
        let inputs = device.clone().autodiff();
        let tokens = Tensor::<2, Int>::zeros([SAMPLES, model.context], &inputs);
        let forward = |ddp: &DistributedDataParallel<_>| {
            ddp.forward(&device, |model: &burn_megatron_models::Transformer| {
                model.losses(tokens.clone(), tokens.clone()).sum()
            })
        };
        ddp.backward_last(forward(&ddp));
        drop(ddp.reduce(1)?);
        let before = heap.live();
        let loss = forward(&ddp);
        let after = heap.live();
        ddp.backward_last(loss);
        Ok(after - before)
    };
    heap::on_ranks(1, run)[0]
}

/// Numbers per token of a layer: `h` for a residual stream, `q` for queries, `kv` for keys, and `f` for a gated MLP
/// after its activation.
#[test]
fn what_is_recomputed_is_not_kept() {
    let _alone = ALONE.lock();
    let model = wide_batch(4);
    let (h, q, kv, f) = (64, 64, 32, 192);
    let bytes = |per_token: usize| (4 * model.layers * SAMPLES * model.context * per_token) as f64;
    let kernels = KernelChoices::default();
    let found = |recompute: &RecomputeConfig| kept(&model, &kernels, recompute) as f64;
    let none = found(&RecomputeConfig::default());
    let fewer = kept(&wide_batch(2), &kernels, &RecomputeConfig::default()) as f64;
    assert_near(
        "two layers",
        none - fewer,
        bytes(4 * h + 2 * q + 2 * kv + 3 * f) / 2.0,
    );
    let selective = RecomputeConfig::selective;
    let uniform = |layers| RecomputeConfig::full(RecomputeMethod::Uniform, layers);
    let whole = 3 * h + 2 * q + 2 * kv + 3 * f;
    let cases = [
        ("norm", selective(vec![Norm]), bytes(2 * h)),
        ("activation", selective(vec![Activation]), bytes(f)),
        ("both", selective(vec![Norm, Activation]), bytes(2 * h + f)),
        ("mlp", selective(vec![Mlp]), bytes(3 * f)),
        (
            "norm and mlp",
            selective(vec![Norm, Mlp]),
            bytes(2 * h + 3 * f),
        ),
        ("full", uniform(1), bytes(whole)),
        // The inputs of every second layer are not kept either.
        ("runs of 2", uniform(2), bytes(whole) + bytes(h) / 2.0),
        (
            "2 of 4 layers",
            RecomputeConfig::full(RecomputeMethod::Block, 2),
            bytes(whole) / 2.0,
        ),
        (
            "attention of one block",
            RecomputeConfig {
                patterns: vec!["blocks.1.attention".into()],
                ..selective(vec![])
            },
            bytes(2 * q + 2 * kv) / 4.0,
        ),
    ];
    let mut by_name = vec![];
    for (name, recompute, expected) in cases {
        let kept = found(&recompute);
        println!("{name}: {kept} of {none} bytes, {expected} fewer expected");
        assert_near(name, none - kept, expected);
        by_name.push((name, kept));
    }
    let kept = |name: &str| by_name.iter().find(|(known, _)| *known == name).unwrap().1;
    assert!(kept("full") < kept("mlp") && kept("mlp") < kept("both") && kept("both") < none);
}

/// Fused attention keeps one number per head in addition to its input and output. Unfused attention keeps two scores
/// per pair of tokens: before and after the softmax.
#[test]
fn core_attention_frees_what_its_engine_keeps() {
    let _alone = ALONE.lock();
    let model = wide_batch(4);
    let recompute = RecomputeConfig::selective([CoreAttention]);
    let freed = |kernels: &KernelChoices| {
        let none = kept(&model, kernels, &RecomputeConfig::default());
        none as f64 - kept(&model, kernels, &recompute) as f64
    };
    let bytes = |per_token: usize| (4 * model.layers * SAMPLES * model.context * per_token) as f64;
    let fused = freed(&KernelChoices::default());
    println!("fused: {fused}");
    assert!(fused.abs() < bytes(2 * model.heads), "{fused}");
    let mut kernels = KernelChoices::default();
    kernels.set("attention=unfused").unwrap();
    let scores = freed(&kernels);
    println!("scores: {scores} of {}", bytes(model.heads * model.context));
    assert!(
        scores > 0.95 * bytes(model.heads * model.context),
        "{scores}"
    );
}

#[track_caller]
fn assert_near(what: &str, found: f64, expected: f64) {
    let apart = (found - expected).abs() / expected;
    assert!(apart < 0.05, "{what}: {found} bytes, expected {expected}");
}

/// The graph of a micro-batch is freed before the next forward pass.
#[test]
fn more_micro_batches_need_no_more_memory() {
    let _alone = ALONE.lock();
    // The model is small, so that activations are larger than parameters.
    let model = TransformerConfig {
        context: 64,
        hidden: 64,
        mlp_width: Some(192),
        ..config()
    };
    let (one, four) = (peak_of_a_step(&model, 1, 0), peak_of_a_step(&model, 4, 0));
    assert!(4 * four < 5 * one, "{one} bytes for one, {four} for four");
}

/// Two samples of 256 tokens with a vocabulary of 8192 have 16 MiB of logits.
#[test]
fn chunks_of_the_loss_bound_the_memory_of_logits() {
    let _alone = ALONE.lock();
    let model = TransformerConfig {
        vocabulary: 8192,
        context: 256,
        hidden: 16,
        layers: 1,
        mlp_width: Some(32),
        ..config()
    };
    let peak = |chunk_size| peak_of_a_step(&model, 1, chunk_size);
    let (whole, chunked) = (peak(0), peak(64));
    let logits = 2 * 256 * 8192 * 4;
    // A chunk has an eighth of the logits, and the weight gradient has 0.5 MiB.
    assert!(
        whole > logits && chunked + 3 * logits / 4 < whole,
        "{whole} bytes with all logits, {chunked} in chunks"
    );
}

#[test]
fn the_heap_is_what_the_ranks_report() {
    let _alone = ALONE.lock();
    for precision in [Precision::F32, Precision::Bf16] {
        for stage in ZeroStage::ALL {
            let settings = DataParallelConfig {
                zero_stage: stage,
                precision,
                ..DataParallelConfig::default()
            };
            let ratio = ratio(&settings);
            assert!(
                (0.95..=1.05).contains(&ratio),
                "ZeRO-{stage}, {precision:?}: {ratio}"
            );
        }
    }
}

/// The heap of all ranks of a context group, in bytes.
struct ContextBytes {
    /// The bytes that are kept between the forward and the backward pass.
    kept: usize,
    /// The sum of the peaks of all ranks in the backward pass.
    peak: usize,
}

/// Runs a forward and a backward pass of a Llama on a sequence of `LONG` tokens.
fn context_bytes(ranks: usize, exchange: Option<ContextExchange>) -> ContextBytes {
    let mut mesh = ParallelConfig::new().with_context(ranks);
    mesh.context_exchange = exchange;
    let config = long();
    let run = |rank: Rank, heap: ThreadHeap| {
        let groups = ParallelContext::new(&mesh, &rank)?;
        let device = Device::flex();
        let model = config.init_with(ModelBuilder::new(&groups, &device))?;
        let mut ddp = DistributedDataParallel::new(model, &groups)?;
        let own = (groups.context().rank(), ranks);
        let shard = SequenceShard::new([1, LONG], None, ContextSplit::Zigzag, own)?;
        let shape = shard.local_shape();
        let device = device.autodiff();
        let together = || {
            groups.world().barrier()?;
            let live = heap.live();
            groups.world().barrier()?;
            Ok::<_, RankError>(live)
        };
        let mut seen = (0, 0);
        // The first pass allocates permanent memory.
        for _ in 0..2 {
            let ids = Tensor::<2, Int>::zeros(shape, &device);
            let tokens = Tokens {
                shard: (ranks > 1).then(|| shard.clone()),
                ..Tokens::from(ids)
            };
            let before = together()?;
            let hidden = ddp.forward(&device, |model| model.hidden(0, None, tokens));
            let loss = hidden.sum();
            let kept = together()? - before;
            heap.reset_peak();
            together()?;
            ddp.backward_last(loss);
            ddp.reduce(1)?;
            together()?;
            seen = (kept, heap.peak() - before);
        }
        Ok(seen)
    };
    let of_ranks = heap::on_ranks(ranks, run);
    ContextBytes {
        kept: of_ranks.iter().map(|(kept, _)| kept).sum(),
        peak: of_ranks.iter().map(|(_, peak)| peak).sum(),
    }
}

const LONG: usize = 512;

/// Returns a model whose keys and values are a large part of its memory.
fn long() -> TransformerConfig {
    TransformerConfig {
        context: LONG,
        hidden: 256,
        layers: 1,
        heads: 4,
        groups: Some(4),
        mlp_width: Some(256),
        ..config()
    }
}

/// An all-to-all keeps the output of attention twice: for the heads of the rank, and for the tokens of the rank.
#[test]
fn ranks_of_a_context_group_keep_their_part_of_the_activations() {
    let _alone = ALONE.lock();
    let one = context_bytes(1, None);
    let config = long();
    let heads = Heads {
        heads: config.heads,
        groups: config.heads,
        width: config.hidden / config.heads,
    };
    for exchange in [ContextExchange::Ring, ContextExchange::AllToAll] {
        for ranks in [2, 4] {
            let layout = ParallelConfig::new().with_context(ranks);
            let cost = ExchangeProblem::of_layout(&layout, heads, LONG, 4).cost(exchange);
            // In the backward pass of a ring, gradients are transferred too.
            let (outputs, travelling) = match exchange {
                ContextExchange::AllToAll => (config.layers * LONG * config.hidden * 4, 1.0),
                _ => (0, 2.0),
            };
            let all = context_bytes(ranks, Some(exchange));
            let kept = all.kept as f64 / (one.kept + outputs) as f64;
            let transient = travelling * ranks as f64 * cost.transient;
            let peak = all.peak as f64 / ((one.peak + outputs) as f64 + transient);
            assert!(
                (kept - 1.0).abs() < 0.05,
                "{exchange}, {ranks} ranks: kept {kept}"
            );
            println!("{exchange}, {ranks} ranks: kept {kept}, peak {peak}");
            // A rank may hold data that another rank has not received yet.
            assert!(
                (0.5..1.15).contains(&peak),
                "{exchange}, {ranks} ranks: peak {peak}"
            );
        }
    }
}
