//! The time of a layer: its operations on the device, and the exchanges that it waits for.

use super::super::hardware::{Hardware, HardwareError};
use super::super::link::sent_bytes;
use super::super::profile::{Exchange, LayerProfile, Product, TrainingPass};
use super::super::{AxisBytes, MeshLinks, Recompute};
use super::{PartSeconds, StepPart};
use burn_megatron::collective::ExchangeKind;
use burn_megatron::mesh::Axis;
use burn_megatron::nn::tp_comm_overlap;

/// The types of a run, as far as they decide its time.
#[derive(Clone, Debug, PartialEq)]
pub struct ComputeTypes {
    /// The type of products: a key of [`Hardware::peak`].
    pub products: String,
    /// The type of attention.
    pub attention: String,
    /// Bytes of an operand of a product.
    pub operand_bytes: f64,
    /// Bytes of a parameter that is gathered.
    pub parameter_bytes: f64,
}

/// A device with the rates of a run's types.
#[derive(Clone, Debug)]
pub struct DeviceRates<'a> {
    hardware: &'a Hardware,
    types: &'a ComputeTypes,
    products: f64,
    attention: f64,
}

/// The seconds of one micro-batch in a layer or a stage.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LayerSeconds {
    /// The seconds of the forward.
    pub forward: PartSeconds,
    /// The seconds of the gradients of the inputs, recomputation included.
    pub input_gradient: PartSeconds,
    /// The seconds of the gradients of the weights.
    pub weight_gradient: PartSeconds,
    /// Of the exchanges in these that travel while another micro-batch is computed, where the layout
    /// [pairs](burn_megatron::mesh::ParallelConfig::overlap_moe_expert_parallel_comm) a forward with the backward of another.
    pub hidden: f64,
    /// The part of these exchanges in a backward that its own weight gradients hide, also where it is alone.
    pub hidden_alone: f64,
}

impl LayerSeconds {
    /// Adds another layer so many times.
    pub fn add(&mut self, other: &Self, times: usize) {
        let times = times as f64;
        self.forward += other.forward * times;
        self.input_gradient += other.input_gradient * times;
        self.weight_gradient += other.weight_gradient * times;
        self.hidden += other.hidden * times;
        self.hidden_alone += other.hidden_alone * times;
    }

    /// The same with recomputation in the backward: selective of what is streamed, full of the whole forward.
    pub fn recomputed(mut self, recompute: Recompute) -> Self {
        self.input_gradient[StepPart::Recomputation] += match recompute {
            Recompute::None => 0.0,
            Recompute::Selective => self.forward[StepPart::Streaming],
            Recompute::Full | Recompute::FullOffloaded => self.forward.total(),
        };
        self
    }

    /// The same with a transfer of so many seconds to the host in the forward, and one from it in the backward: what is
    /// longer than the pass is waited for.
    pub fn offloaded(mut self, transfer: f64) -> Self {
        let backward = self.input_gradient.total() + self.weight_gradient.total();
        self.input_gradient[StepPart::Offload] += (transfer - backward).max(0.0);
        self.forward[StepPart::Offload] += (transfer - self.forward.total()).max(0.0);
        self
    }

    /// The seconds of all three.
    pub fn total(&self) -> PartSeconds {
        self.forward + self.input_gradient + self.weight_gradient
    }

    /// The same of a micro-batch that is paired with others.
    pub fn in_pairs(&self) -> PartSeconds {
        let mut seconds = self.total();
        seconds[StepPart::Expert] -= self.hidden;
        seconds
    }
}

impl<'a> DeviceRates<'a> {
    /// The rates of a device for these types.
    ///
    /// # Errors
    ///
    /// [`HardwareError::NoPeak`] if it has none for one of them.
    pub fn new(hardware: &'a Hardware, types: &'a ComputeTypes) -> Result<Self, HardwareError> {
        Ok(Self {
            hardware,
            types,
            products: hardware.peak_of(&types.products)?,
            attention: hardware.peak_of(&types.attention)?,
        })
    }

    /// The hardware.
    pub fn hardware(&self) -> &'a Hardware {
        self.hardware
    }

    /// The peak of products, which utilisation is relative to.
    pub fn peak(&self) -> f64 {
        self.products
    }

    /// Whether exchanges overlap with computation: not where the ranks share cores, which copy what is sent.
    pub(super) fn hides(&self) -> bool {
        self.hardware.cores.is_none()
    }

    /// The seconds of a product: those of its operations or, where longer, of its operands and result.
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

    /// The seconds of a layer.
    ///
    /// The gradients of both operands of a product take as long as the product; the backward of attention has 2.5 times its
    /// operations (one product more), that of streaming operations twice their bytes (the gradient too). Exchanges of the
    /// tensor axis in the backward run while the weight gradients are computed, those of the forward while its products are
    /// where they are [in chunks](burn_megatron::nn::tp_comm_overlap), and messages of a context ring while attention is. Rows of
    /// experts in the forward travel under the backward of another micro-batch, and those in the backward under its forward and
    /// the own weight gradients, where the layout has such pairs. All others are waited for. On shared cores all are.
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

    /// The seconds of the exchanges of a pass by part, those of the messages of a ring, which are in no part, and those of
    /// rows of experts that are sent to each rank.
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

/// The part that an exchange belongs to: that of its outermost kind of axis.
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

/// Adds the bytes that a rank sends in these passes of a layer, so many times.
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
