//! Estimates the time of a layer: its operations on the device, and the communication for which it waits.

use super::super::hardware::{Hardware, HardwareError};
use super::super::link::sent_bytes;
use super::super::profile::{Exchange, LayerProfile, Product, TrainingPass};
use super::super::{AxisBytes, MeshLinks, Recompute};
use super::{PartSeconds, StepPart};
use burn_megatron::collective::ExchangeKind;
use burn_megatron::mesh::Axis;
use burn_megatron::nn::tp_comm_overlap;

/// The dtypes of a training run that affect its step time.
#[derive(Clone, Debug, PartialEq)]
pub struct ComputeTypes {
    /// The dtype of matrix multiplications, as a key of [`Hardware::peak`].
    pub products: String,
    /// The dtype of attention, as a key of [`Hardware::peak`].
    pub attention: String,
    /// The number of bytes per element in the operands of matrix multiplications.
    pub operand_bytes: f64,
    /// The number of bytes per parameter element in all-gathers of parameters.
    pub parameter_bytes: f64,
}

/// The throughput of a device for the dtypes of a training run.
#[derive(Clone, Debug)]
pub struct DeviceRates<'a> {
    hardware: &'a Hardware,
    types: &'a ComputeTypes,
    products: f64,
    attention: f64,
}

/// The estimated time of one micro-batch in a layer or a pipeline stage, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LayerSeconds {
    /// The time of the forward.
    pub forward: PartSeconds,
    /// The time of the part of the backward that computes the gradients of the inputs, including recomputation.
    pub input_gradient: PartSeconds,
    /// The time of the part of the backward that computes the gradients of the weights.
    pub weight_gradient: PartSeconds,
    /// The communication time that overlaps with the computation of another micro-batch. It is 0 unless the layout
    /// [runs a forward together with the backward of another
    /// micro-batch](burn_megatron::mesh::ParallelConfig::overlap_moe_expert_parallel_comm).
    pub hidden: f64,
    /// The communication time of a backward that overlaps with the weight gradients of the same backward. This overlap
    /// does not need another micro-batch.
    pub hidden_alone: f64,
}

impl LayerSeconds {
    /// Adds the time of another layer, multiplied by `times`.
    pub fn add(&mut self, other: &Self, times: usize) {
        let times = times as f64;
        self.forward += other.forward * times;
        self.input_gradient += other.input_gradient * times;
        self.weight_gradient += other.weight_gradient * times;
        self.hidden += other.hidden * times;
        self.hidden_alone += other.hidden_alone * times;
    }

    /// Adds the time of recomputation to the backward. Selective recomputation repeats the memory-bound operations of
    /// the forward. Full recomputation repeats the whole forward.
    pub fn recomputed(mut self, recompute: Recompute) -> Self {
        self.input_gradient[StepPart::Recomputation] += match recompute {
            Recompute::None => 0.0,
            Recompute::Selective => self.forward[StepPart::Streaming],
            Recompute::Full | Recompute::FullOffloaded => self.forward.total(),
        };
        self
    }

    /// Adds the time of activation offload. `transfer` is the time in seconds to copy the input to the host in the
    /// forward, or back in the backward. A pass waits only if the copy takes longer than the pass.
    pub fn offloaded(mut self, transfer: f64) -> Self {
        let backward = self.input_gradient.total() + self.weight_gradient.total();
        self.input_gradient[StepPart::Offload] += (transfer - backward).max(0.0);
        self.forward[StepPart::Offload] += (transfer - self.forward.total()).max(0.0);
        self
    }

    /// Returns the total time: the forward and both parts of the backward.
    pub fn total(&self) -> PartSeconds {
        self.forward + self.input_gradient + self.weight_gradient
    }

    /// Returns the time of a micro-batch if each pass runs together with a pass of another micro-batch.
    pub fn in_pairs(&self) -> PartSeconds {
        let mut seconds = self.total();
        seconds[StepPart::Expert] -= self.hidden;
        seconds
    }
}

impl<'a> DeviceRates<'a> {
    /// Creates the throughput of a device for the given dtypes.
    ///
    /// # Errors
    ///
    /// [`HardwareError::NoPeak`] if the hardware has no peak throughput for one of the dtypes.
    pub fn new(hardware: &'a Hardware, types: &'a ComputeTypes) -> Result<Self, HardwareError> {
        Ok(Self {
            hardware,
            types,
            products: hardware.peak_of(&types.products)?,
            attention: hardware.peak_of(&types.attention)?,
        })
    }

    /// Returns the hardware constants.
    pub fn hardware(&self) -> &'a Hardware {
        self.hardware
    }

    /// Returns the peak throughput of matrix multiplications in FLOP/s. Model FLOPs utilization (MFU) is relative to
    /// this peak.
    pub fn peak(&self) -> f64 {
        self.products
    }

    /// Returns whether communication overlaps with computation. It does not if ranks share CPU cores, because the cores
    /// also copy the messages.
    pub(super) fn hides(&self) -> bool {
        self.hardware.cores.is_none()
    }

    /// Returns the time of a matrix multiplication in seconds. It is the time to compute the FLOPs, or the time to read
    /// the operands and write the result, whichever is longer.
    pub fn product(&self, product: &Product) -> f64 {
        let [batch, m, n, k] =
            [product.batch, product.m, product.n, product.k].map(|size| size as f64);
        let size = (m * n * k).cbrt();
        let share = self.hardware.product_share(&self.types.products, size);
        let bytes = self.types.operand_bytes * batch * (m * k + k * n + m * n);
        let seconds = product.flops() / (share * self.products);
        seconds.max(bytes / self.hardware.bandwidth)
    }

    fn streamed(&self, bytes: f64) -> f64 {
        bytes / self.hardware.bandwidth
    }

    /// Returns the estimated time of a layer for one micro-batch.
    ///
    /// The time of the backward is computed from the forward:
    ///
    /// - A matrix multiplication has two gradients, and each takes the time of the multiplication in the forward.
    /// - The backward of attention has 2.5 times the FLOPs of the forward, because it computes the scores again.
    /// - Memory-bound operations read and write twice the number of bytes, because they also read and write gradients.
    ///
    /// The following communication overlaps with computation, unless ranks share CPU cores:
    ///
    /// - Tensor-parallel collectives of the backward overlap with the weight gradients. Tensor-parallel collectives of
    ///   the forward overlap with matrix multiplications if these are [split into
    ///   chunks](burn_megatron::nn::tp_comm_overlap).
    /// - Messages of ring attention (context parallelism) overlap with attention.
    /// - All-to-alls of expert parallelism overlap with another micro-batch, if the layout runs a forward together with
    ///   the backward of another micro-batch. The all-to-alls of a forward then overlap with the backward of the other
    ///   micro-batch. The all-to-alls of a backward overlap with the forward of the other micro-batch, or with the
    ///   weight gradients of the same layer.
    ///
    /// The rank waits for all other communication.
    pub fn layer(&self, layer: &LayerProfile, links: &MeshLinks<'_>) -> LayerSeconds {
        let products: f64 = layer.products.iter().map(|p| self.product(p)).sum();
        let flops: f64 = layer.attention.iter().map(|shape| shape.flops()).sum();
        let share = self.hardware.attention;
        let attention = [share.forward, share.backward / 2.5];
        let attention = attention.map(|share| flops / (share * self.attention));
        let streamed = self.streamed(layer.streamed_bytes as f64);

        let mut forward = PartSeconds::of(StepPart::Products, products);
        forward[StepPart::Attention] = attention[0];
        forward[StepPart::Streaming] = streamed;
        let mut input_gradient = PartSeconds::of(StepPart::Products, products);
        input_gradient[StepPart::Attention] = attention[1];
        input_gradient[StepPart::Streaming] = 2.0 * streamed;
        let overhead = layer.operations as f64 * self.hardware.operation;
        forward[StepPart::Overhead] = overhead;
        input_gradient[StepPart::Overhead] = overhead;
        let exchanged = |pass| self.exchanged(layer, links, pass);
        let hidden = |seconds: f64| if self.hides() { seconds } else { 0.0 };
        let hide = |seconds: &mut PartSeconds, ring: f64, attention: f64| {
            seconds[StepPart::Context] += (ring - hidden(attention)).max(0.0);
        };
        let computed = [forward, input_gradient].map(|pass| pass.total());
        let (mut waited, ring, rows) = exchanged(TrainingPass::Forward);
        let mut hidden_rows = rows.min(hidden(computed[1] + products));
        let (layout, transfer) = (links.mesh().config(), waited[StepPart::Tensor]);
        waited[StepPart::Tensor] = tp_comm_overlap::exposed(layout, transfer, hidden(products));
        forward += waited;
        hide(&mut forward, ring, attention[0]);
        let (mut waited, ring, rows) = exchanged(TrainingPass::Backward);
        waited[StepPart::Tensor] = (waited[StepPart::Tensor] - hidden(products)).max(0.0);
        input_gradient += waited;
        hide(&mut input_gradient, ring, attention[1]);
        hidden_rows += rows.min(hidden(computed[0]));
        let pairs = layout.overlap_moe_expert_parallel_comm;
        let of_pairs = |seconds: f64| if pairs { seconds } else { 0.0 };
        LayerSeconds {
            forward,
            input_gradient,
            weight_gradient: PartSeconds::of(StepPart::Products, products),
            hidden: of_pairs(hidden_rows),
            hidden_alone: of_pairs(rows.min(hidden(products))),
        }
    }

    /// Returns three communication times of a pass, in seconds. The first is the time divided into parts. The second is
    /// the time of the messages of ring attention, which the first does not include. The third is the time of the
    /// all-to-alls of expert parallelism.
    fn exchanged(
        &self,
        layer: &LayerProfile,
        links: &MeshLinks<'_>,
        pass: TrainingPass,
    ) -> (PartSeconds, f64, f64) {
        let (mut waited, mut ring, mut rows) = (PartSeconds::default(), 0.0, 0.0);
        for exchange in layer.exchanges.iter().filter(|other| other.pass == pass) {
            let group = links.of(exchange);
            let seconds = group.seconds(self.hardware, exchange.kind, exchange.bytes as f64);
            let (kind, part) = (exchange.kind, part(exchange));
            waited[StepPart::Overhead] += self.hardware.operation;
            if (kind, part) == (ExchangeKind::SendReceive, StepPart::Context) {
                ring += seconds;
            } else {
                waited[part] += seconds;
            }
            if (kind, part) == (ExchangeKind::AllToAll, StepPart::Expert) {
                rows += seconds;
            }
        }
        (waited, ring, rows)
    }
}

/// Returns the part of the step to which a collective belongs, depending on its axes. Expert axes come before context,
/// data and tensor.
fn part(exchange: &Exchange) -> StepPart {
    let has = |axis| exchange.axes.contains(axis);
    if has(Axis::Expert) || has(Axis::ExpertTensor) {
        StepPart::Expert
    } else if has(Axis::Context) {
        StepPart::Context
    } else if has(Axis::Data) {
        StepPart::Data
    } else {
        StepPart::Tensor
    }
}

/// Adds the number of bytes that a rank sends in the given passes of a layer, multiplied by `times`.
pub fn add_sent(bytes: &mut AxisBytes, layer: &LayerProfile, passes: &[TrainingPass], times: f64) {
    let exchanges = layer.exchanges.iter();
    for exchange in exchanges.filter(|exchange| passes.contains(&exchange.pass)) {
        let sent = sent_bytes(
            exchange.kind,
            exchange.bytes as f64,
            exchange.ranks as usize,
        );
        bytes.add(exchange.axes, sent * times);
    }
}
