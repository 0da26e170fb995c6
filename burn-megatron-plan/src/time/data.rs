//! Estimates the time of data-parallel communication and of the optimizer.

use super::super::link::sent_bytes;
use super::super::model_profile::GridElements;
use super::super::{AxisBytes, GroupLinks};
use super::{DeviceRates, LayerSeconds};
use burn_megatron::collective::ExchangeKind;
use burn_megatron::data_parallel::{DataParallelConfig, ParameterGather};
use burn_megatron::mesh::{Axis, Grid, ZeroStage};

/// Bytes that the optimizer reads and writes per element. It reads the gradient, the master weight and the moments in
/// f32. It writes the master weight, the moments and the 16-bit parameter. It reads the gradient once more for the
/// gradient norm.
const OPTIMIZER_BYTES: f64 = 4.0 + 3.0 * 8.0 + 2.0 + 4.0;

/// Bytes that the CPU of the host reads and writes per element: the gradient, the master weight and the moments.
const HOST_BYTES: f64 = 4.0 + 3.0 * 8.0;

/// The time that data-parallel communication and the optimizer add to a step, and the bytes that a rank sends.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DataExchange {
    /// The time that the rank waits for gradients and parameters, in seconds.
    pub waited: f64,
    /// The time of the optimizer step, in seconds.
    pub optimizer: f64,
    /// The number of bytes that the rank sends over the data axis.
    pub bytes: f64,
}

/// The settings that determine how the training state of a rank is sharded and communicated.
#[derive(Clone, Copy, Debug)]
pub struct StateSharing<'a> {
    /// The data-parallel settings.
    pub data: &'a DataParallelConfig,
    /// The number of bytes per parameter element in all-gathers of parameters.
    pub parameter_bytes: f64,
    /// The share of the optimizer state that is offloaded to the host, from 0 to 1.
    pub offloaded: f64,
}

impl DataExchange {
    /// Estimates the data-parallel communication of a rank with these `parameters`. `seconds` is the time of a
    /// micro-batch on this rank. `groups` are the [links of the sharding groups](super::super::MeshLinks::sharding) of
    /// the dense and the expert grid.
    ///
    /// Gradients are reduced during the backward of the last micro-batch. With ZeRO-2 and ZeRO-3, they are reduced
    /// during every backward. Parameters are gathered during the first forward. With ZeRO-3, they are gathered during
    /// each forward and each backward. Communication overlaps with the computation. The rank waits only if the
    /// communication takes longer than the computation.
    ///
    /// The offloaded part of the optimizer state is updated on the host while the device updates the remaining part.
    /// Gradients are copied to the host, and parameters are copied back, bucket by bucket.
    pub fn new(
        parameters: GridElements,
        groups: &[[GroupLinks; 2]; 2],
        seconds: &LayerSeconds,
        micro_batches: usize,
        state: StateSharing<'_>,
        rates: &DeviceRates<'_>,
    ) -> Self {
        let mut sum = Self::default();
        let StateSharing {
            data: sharing,
            parameter_bytes,
            offloaded,
        } = state;
        let stage = sharing.zero_stage;
        let gradient = if sharing.reduce_in_16_bits { 2.0 } else { 4.0 };
        let (mut reduced, mut gathered) = (0.0, 0.0);
        let gather = sharing.gathers();
        let gathers = match gather {
            ParameterGather::Never => 0,
            ParameterGather::AfterStep | ParameterGather::DuringForward => 1,
            ParameterGather::BeforeForward => micro_batches,
            ParameterGather::BeforeUse => 2 * micro_batches,
        };
        let reductions = match stage {
            ZeroStage::Replicated | ZeroStage::Optimizer => 1,
            ZeroStage::Gradients | ZeroStage::Parameters => micro_batches,
        };
        for (grid, [shard, replicas]) in [Grid::Dense, Grid::Expert].into_iter().zip(groups) {
            let elements = parameters.of(grid) as f64;
            let mut exchange = |kind, group: &GroupLinks, bytes: f64, times| {
                sum.bytes += sent_bytes(kind, bytes, group.size()) * times as f64;
                group.seconds(rates.hardware(), kind, bytes)
            };
            let own = elements / shard.size() as f64;
            reduced += exchange(
                ExchangeKind::ReduceScatter,
                shard,
                gradient * elements,
                reductions,
            );
            reduced += exchange(
                ExchangeKind::AllReduce,
                replicas,
                gradient * own,
                reductions,
            );
            gathered += exchange(
                ExchangeKind::AllGather,
                shard,
                parameter_bytes * elements,
                gathers,
            );
            let hardware = rates.hardware();
            let on_device = OPTIMIZER_BYTES * own * (1.0 - offloaded) / hardware.bandwidth;
            let on_host = hardware.host.map_or(0.0, |host| {
                let sent = gradient.max(parameter_bytes) / host.link;
                own * offloaded * sent.max(HOST_BYTES / host.bandwidth)
            });
            sum.optimizer += on_device.max(on_host);
        }
        let hidden = if rates.hides() { 1.0 } else { 0.0 };
        let forward = hidden * seconds.forward.total();
        let backward = hidden * (seconds.input_gradient.total() + seconds.weight_gradient.total());
        let over = |window: f64, exchange: f64| (exchange - window).max(0.0);
        sum.waited = match stage {
            ZeroStage::Parameters => {
                let is_kept = gather == ParameterGather::BeforeForward;
                let in_backward = reduced + if is_kept { 0.0 } else { gathered };
                micro_batches as f64 * (over(forward, gathered) + over(backward, in_backward))
            }
            _ => {
                let is_hidden = gather == ParameterGather::DuringForward;
                let window = if is_hidden { forward } else { 0.0 };
                over(backward, reduced) * reductions as f64
                    + if gathers > 0 {
                        over(window, gathered)
                    } else {
                        0.0
                    }
            }
        };
        sum
    }

    /// Adds the number of sent bytes to the byte count of the data axis.
    pub fn add_to(&self, bytes: &mut AxisBytes) {
        bytes.add(Axis::Data.into(), self.bytes);
    }
}
