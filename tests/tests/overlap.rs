//! Tests that communication overlaps with computation only if requested.
//!
//! Layers and transfers have simulated times, so the results do not depend on the load of the machine.

use std::sync::Arc;
use std::time::Duration;

use burn::backend::DispatchTensor;
use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor, TensorData};
use burn_megatron::comm::{ParallelContext, Rank, World};
use burn_megatron::data_parallel::{DataParallelConfig, DistributedDataParallel, ZeroStage};
use burn_megatron::kernels::{Function, apply};
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::nn::ParallelModule;
use burn_megatron::nn::hook::with_anchor;
use burn_megatron::optim::{AdamWConfig, ParallelAdamW};
use burn_megatron_comm_testing::{Link, SimulatedNetwork, Transfer, hidden_share};

const LAYERS: usize = 12;
const WIDTH: usize = 64;
const STEPS: usize = 3;
/// The time of a layer in each direction.
const COMPUTING: Duration = Duration::from_millis(12);
/// The time of a transfer.
const LATENCY: Duration = Duration::from_millis(4);

type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// The identity with a simulated time.
#[derive(Debug)]
struct Pause(Arc<Link>);

impl Function for Pause {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        self.0.advance(COMPUTING);
        (inputs.remove(0), vec![])
    }

    fn backward(
        &self,
        _saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        self.0.advance(COMPUTING);
        vec![Some(gradient)]
    }
}

#[derive(Module, Debug)]
struct Model {
    layers: Vec<Linear>,
}

impl Model {
    fn new(device: &Device) -> Self {
        let layer = |_| LinearConfig::new(WIDTH, WIDTH).init(device);
        let model = Self {
            layers: (0..LAYERS).map(layer).collect(),
        };
        model.map(&mut Fill(0))
    }

    fn loss(&self, rank: usize, link: &Arc<Link>, device: &Device) -> Tensor<1> {
        let layers = self.layers.iter();
        let input = Tensor::full([4, WIDTH], 1.0 + rank as f64, device);
        let y = layers.fold(input, |x: Tensor<2>, layer| {
            // A gradient leaves the backward pass at the input of the layer.
            let y = with_anchor(&x, || layer.forward(x.clone()));
            apply(vec![y.into_dispatch()], Pause(link.clone()))
        });
        (y.clone() * y).sum()
    }
}

/// Initial weights that are equal in every run.
struct Fill(usize);

impl ModuleMapper for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.0 += 1;
        param.map(|tensor| {
            let shape = tensor.dims();
            let value = |i: usize| (0.7 * i as f32 + self.0 as f32).sin() / 6.0;
            let values: Vec<_> = (0..shape.iter().product()).map(value).collect();
            Tensor::from_data(TensorData::new(values, shape), &tensor.device())
        })
    }
}

/// The results of a rank: the transfers over its link, and the bits of its weights.
type Left = (Vec<Transfer>, Vec<u32>);

fn train(rank: &Rank, zero_stage: ZeroStage, overlap: bool) -> Result<Left, AnyError> {
    let groups = ParallelContext::new(&ParallelConfig::new().with_data(2), rank)?;
    let link = Link::with_virtual_clock(LATENCY, f64::INFINITY)?;
    let data = SimulatedNetwork::over(groups.data().clone(), &link);
    let groups = groups.with_data(data);
    let model = ParallelModule::replicated(Model::new(&Device::flex()));
    let settings = DataParallelConfig {
        zero_stage,
        // One layer per bucket.
        bucket_size: Some(WIDTH * WIDTH),
        overlap_grad_reduce: overlap,
        overlap_param_gather: overlap
            && matches!(zero_stage, ZeroStage::Optimizer | ZeroStage::Gradients),
        ..DataParallelConfig::default()
    };
    let mut ddp = DistributedDataParallel::with(model, &groups, &settings)?;
    assert_eq!(ddp.layout().bucket_count(), LAYERS);
    let mut optimizer = ParallelAdamW::new(&AdamWConfig::default(), &ddp)?;
    let device = Device::flex().autodiff();
    link.take_transfers();
    for _ in 0..STEPS {
        let loss = ddp.forward(&device, |model| model.loss(rank.rank(), &link, &device));
        ddp.backward_last(loss);
        let gradients = ddp.reduce(4)?;
        optimizer.step(1e-3, &mut ddp, gradients);
    }
    let transfers = link.take_transfers();
    let weights = Tensor::cat(ddp.parameters(), 0).into_data();
    let weights = weights.try_into_vec::<f32>()?.into_iter();
    Ok((transfers, weights.map(f32::to_bits).collect()))
}

fn run(stage: ZeroStage, overlap: bool) -> Vec<Left> {
    let world = World::threads(2).unwrap().compute_threads(1);
    world.run(|rank| train(&rank, stage, overlap)).unwrap()
}

/// Returns the overlapped fraction of the calls that `is` selects, for both ranks and each step. `each` is the number
/// of these calls per step.
#[track_caller]
fn shares(stage: ZeroStage, overlap: bool, each: usize, is: fn(&Transfer) -> bool) -> Vec<f64> {
    let ranks = run(stage, overlap);
    let of_rank = |(transfers, _): Left| -> Vec<f64> {
        let chosen: Vec<_> = transfers.into_iter().filter(is).collect();
        assert_eq!(chosen.len(), each * STEPS, "ZeRO-{stage}");
        chosen.chunks(each).map(hidden_share).collect()
    };
    ranks.into_iter().flat_map(of_rank).collect()
}

fn is_gradient(transfer: &Transfer) -> bool {
    matches!(transfer.op, "all_reduce" | "reduce_scatter")
}

/// Returns whether a transfer gathers parameters. Token counts are gathered too.
fn is_parameter(transfer: &Transfer) -> bool {
    transfer.op == "all_gather" && transfer.bytes > 1000
}

#[test]
fn gradients_are_reduced_during_the_backward() {
    for stage in ZeroStage::ALL {
        let on = shares(stage, true, LAYERS, is_gradient);
        assert!(on.iter().all(|share| *share > 0.5), "ZeRO-{stage}: {on:?}");
    }
}

#[test]
fn without_overlap_gradients_are_waited_for() {
    for stage in ZeroStage::ALL {
        let off = shares(stage, false, LAYERS, is_gradient);
        assert!(
            off.iter().all(|share| *share < 0.15),
            "ZeRO-{stage}: {off:?}"
        );
    }
}

#[test]
fn parameters_are_gathered_while_the_next_forward_begins() {
    for stage in [ZeroStage::Optimizer, ZeroStage::Gradients] {
        // The prefetch of the last step is not needed any more. Its fraction is 1.
        let counted = |shares: Vec<f64>| -> Vec<f64> {
            let of_rank = shares.chunks(STEPS);
            of_rank
                .flat_map(|shares| &shares[..STEPS - 1])
                .copied()
                .collect()
        };
        let on = counted(shares(stage, true, LAYERS, is_parameter));
        assert!(on.iter().all(|share| *share > 0.5), "ZeRO-{stage}: {on:?}");
        let off = counted(shares(stage, false, LAYERS, is_parameter));
        assert!(
            off.iter().all(|share| *share < 0.15),
            "ZeRO-{stage}: {off:?}"
        );
    }
}

#[test]
fn full_sharding_gathers_the_next_layer_ahead() {
    let ahead = shares(ZeroStage::Parameters, true, LAYERS, is_parameter);
    assert!(ahead.iter().all(|share| *share > 0.5), "{ahead:?}");
}

#[test]
fn overlap_changes_no_bit() {
    let reference = run(ZeroStage::Replicated, false);
    let weights = |left: Vec<Left>| -> Vec<Vec<u32>> {
        left.into_iter().map(|(_, weights)| weights).collect()
    };
    let reference = weights(reference);
    assert_eq!(reference[0], reference[1]);
    for stage in ZeroStage::ALL {
        for overlap in [true, false] {
            let found = weights(run(stage, overlap));
            assert!(found == reference, "ZeRO-{stage}, overlap {overlap}");
        }
    }
}
