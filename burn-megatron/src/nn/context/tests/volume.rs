//! Tests the number of bytes and the number of calls of each exchange.

use std::sync::Mutex;

use super::*;
use crate::comm::{Call, Communicator};
use crate::mesh::{Axis, Grid};
use burn_megatron_comm_testing::Intercept;

/// The bytes that a rank sends to other ranks, and the number of calls.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Sent {
    bytes: usize,
    calls: usize,
}

/// Wraps a communicator to count the bytes that a rank sends.
fn counting(inner: Arc<dyn Communicator>, sent: Arc<Mutex<Sent>>) -> Arc<dyn Communicator> {
    Intercept::over(inner, move |inner, call, input| {
        let (ranks, elements) = (inner.size(), input.len());
        let to_others = match &call {
            Call::AllToAll { send, .. } => elements - send[inner.rank()],
            Call::AllGather => elements * (ranks - 1),
            Call::ReduceScatter(_) => elements / ranks * (ranks - 1),
            other => panic!("{other:?}"),
        };
        let mut sent = sent.lock().unwrap();
        sent.bytes += to_others * input.dtype().size_of();
        sent.calls += 1;
        inner.start(call, input)
    })
}

/// Returns the volume that each rank sends in the forward pass and in the backward pass of a layer.
fn sent(layout: &ParallelConfig, case: &LayerCase) -> Vec<[Sent; 2]> {
    let run = |rank: Rank| {
        let sent = Arc::new(Mutex::default());
        let groups = ParallelContext::new(layout, &rank)?;
        let counting = counting(groups.context().clone(), Arc::clone(&sent));
        let groups = groups.with_group(Grid::Dense, Axis::Context, counting);
        let (layer, _) = case.layer(&groups)?;
        let split = layout.context_split;
        let shard = SequenceShard::new([BATCH, SEQ], None, split, (rank.rank(), layout.context))?;
        let device = Device::flex().autodiff();
        let shape = [BATCH, SEQ / layout.context, HIDDEN];
        let x = Tensor::<3>::ones(shape, (&device, DType::F64)).require_grad();
        let y = layer.forward_with_context(x, None, AttentionContext::Sharded(&shard));
        let forward = std::mem::take(&mut *sent.lock().unwrap());
        let _gradients = y.sum().backward();
        let backward = *sent.lock().unwrap();
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>([forward, backward])
    };
    World::threads(layout.context).unwrap().run(run).unwrap()
}

#[test]
fn every_exchange_sends_what_its_formula_says() {
    for ranks in [2, 4] {
        for layout in layouts(ranks) {
            for groups in [1, 2, 4] {
                let case = LayerCase::new(4, groups);
                let heads = Heads {
                    heads: 4,
                    groups,
                    width: 4,
                };
                let problem = ExchangeProblem::of_layout(&layout, heads, BATCH * SEQ, 8);
                let cost = problem.cost(layout.context_exchange.unwrap());
                for [forward, backward] in sent(&layout, &case) {
                    let what = format!("{}, {groups} groups", name(&layout));
                    assert_eq!(forward.bytes as f64, cost.forward, "{what}: forward");
                    assert_eq!(backward.bytes as f64, cost.backward, "{what}: backward");
                }
            }
        }
    }
}

/// All ranks make the same number of calls, even for blocks in which they attend to nothing.
#[test]
fn a_ring_sends_each_block_on_until_all_ranks_have_had_it() {
    for split in [ContextSplit::Zigzag, ContextSplit::Contiguous] {
        let layout = ParallelConfig::new()
            .with_context(4)
            .with_data(1)
            .with_context_exchange(ContextExchange::Ring)
            .with_context_split(split);
        for [forward, backward] in sent(&layout, &LayerCase::new(4, 2)) {
            assert_eq!((forward.calls, backward.calls), (3, 6));
        }
    }
}
