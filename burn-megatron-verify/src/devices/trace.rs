//! Records the operations of a forward with their modules, and runs them on a device.

use std::collections::{BTreeMap, HashMap};

use burn::module::Module;
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_ir::{FloatOperationIr, OperationIr, TensorId, TensorIr};
use burn_megatron_kernels::record::{
    RecordedCall, RecordedStep, Recording, Replay, ShapeSettings, record,
};

use super::Batch;
use super::compare::{CANCELLED, Scale, Units, largest};
use super::paths::Paths;
use super::place::place;
use super::report::{FirstDifference, ReplayMode};
use super::step::{caught, floats};
use super::types::Types;
use burn_megatron_plan::recorded_step::operation_name;

mod judge;

use judge::Limit;

/// A recorded forward.
pub(super) struct Trace {
    nodes: Vec<Node>,
    values: BTreeMap<TensorId, TensorData>,
    calls: Vec<RecordedCall>,
    /// Parameters in the order in which the forward reads them.
    pub parameters: Vec<String>,
}

struct Node {
    what: What,
    name: String,
    /// The path of the module to which the operation belongs.
    module: String,
    inputs: Vec<TensorIr>,
    outputs: Vec<TensorIr>,
}

enum What {
    Operation(OperationIr),
    /// The index of a call to a function with custom kernels.
    Call(usize),
}

impl Trace {
    /// Records the forward.
    ///
    /// # Errors
    ///
    /// The reason why the forward cannot be recorded.
    pub fn record<M: Module, B: Batch>(
        model: &M,
        batch: &B,
        loss: impl Fn(&M, &B) -> Tensor<1>,
    ) -> Result<Self, String> {
        let recorded = record(ShapeSettings::default(), |device| {
            let model = place(model, device, None);
            let mut paths = Paths::default();
            model.visit(&mut paths);
            loss(&model, &batch.on(device, None));
            paths.found
        });
        let (paths, recording) = recorded.map_err(|error| error.to_string())?;
        Ok(Self::of(recording, &paths))
    }

    fn of(recording: Recording, paths: &HashMap<TensorId, String>) -> Self {
        let Recording {
            steps,
            calls,
            values,
        } = recording;
        let (mut nodes, mut parameters) = (vec![], vec![]);
        let mut module = String::new();
        let mut inside = None;
        for step in steps {
            let (what, name, inputs, outputs) = match step {
                RecordedStep::Operation(operation) if inside.is_none() => {
                    if matches!(operation, OperationIr::Init(_) | OperationIr::Drop(_)) {
                        continue;
                    }
                    let inputs = operation.inputs().cloned().collect();
                    let outputs = operation.outputs().cloned().collect();
                    let name = operation_name(&operation);
                    (What::Operation(operation), name, inputs, outputs)
                }
                RecordedStep::Forward(call) if inside.is_none() => {
                    inside = Some(call);
                    let of = &calls[call];
                    let parts = (of.name.clone(), of.inputs.clone(), of.outputs.clone());
                    (What::Call(call), parts.0, parts.1, parts.2)
                }
                RecordedStep::ForwardEnd(call) if inside == Some(call) => {
                    inside = None;
                    // The outputs of the call have been recorded.
                    continue;
                }
                _ => continue,
            };
            let inputs: Vec<TensorIr> = inputs;
            let read = inputs.iter().filter_map(|input| paths.get(&input.id));
            for path in read
                .clone()
                .filter(|path| !parameters.contains(*path))
                .collect::<Vec<_>>()
            {
                parameters.push(path.clone());
            }
            if let Some(path) = read.into_iter().next() {
                module = path
                    .rsplit_once('.')
                    .map_or("", |(module, _)| module)
                    .into();
            }
            nodes.push(Node {
                what,
                name,
                module: module.clone(),
                inputs,
                outputs,
            });
        }
        Self {
            nodes,
            values,
            calls,
            parameters,
        }
    }

    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Returns the size in bytes of all operation outputs of each module.
    pub fn output_bytes(&self) -> BTreeMap<String, u64> {
        let mut modules = BTreeMap::new();
        for node in &self.nodes {
            let bytes = node
                .outputs
                .iter()
                .map(|it| it.shape.num_elements() * it.dtype.size());
            *modules.entry(node.module.clone()).or_default() += bytes.sum::<usize>() as u64;
        }
        modules
    }

    /// Returns the first operation that draws random numbers.
    pub fn random(&self) -> Option<String> {
        let is_random = |node: &&Node| {
            matches!(
                &node.what,
                What::Operation(OperationIr::Float(_, FloatOperationIr::Random(_)))
            ) || node.name.starts_with("IntRandom")
                || node.name.starts_with("Random")
        };
        let node = self.nodes.iter().find(is_random)?;
        let module = &node.module;
        Some(format!("{} in or after `{module}`", node.name))
    }

    /// Returns the properties on which the rounding error of all operations depends.
    pub fn scale(&self) -> Scale {
        let longest = self.nodes.iter().map(Node::longest_sum).max().unwrap_or(1);
        let outputs = self.nodes.iter().flat_map(|node| &node.outputs);
        let dtypes = outputs.map(|output| output.dtype);
        let narrowest = dtypes
            .filter(DType::is_float)
            .min_by_key(|dtype| match dtype {
                DType::BF16 => 0,
                DType::F16 => 1,
                DType::F64 => 3,
                _ => 2,
            });
        Scale {
            longest_sum: longest,
            narrowest: narrowest.unwrap_or(DType::F32),
            has_products: self.nodes.iter().any(Node::is_product),
        }
    }

    /// Runs each operation separately on `device`. The inputs of an operation are computed on the CPU in f64 and
    /// rounded to their dtypes. Returns the first operation whose output differs from the output on the CPU.
    ///
    /// # Errors
    ///
    /// A message about the operation that cannot be run. `compared` is set to the number of previous operations.
    pub fn alone(
        &self,
        device: &Device,
        units: &Units,
        compared: &mut usize,
    ) -> Result<Option<FirstDifference>, String> {
        let cpu = Device::flex();
        let mut oracle = replay(&cpu, false)?;
        let mut tested = replay(device, false)?;
        let (exact, in_own_types) = (Types::of(&cpu, true), Types::of(&cpu, false));
        let own = Types::of(device, false);
        let last = self.last_uses(self.len());
        let mut known = self.values.clone();
        for (number, node) in self.nodes.iter().enumerate() {
            let missing = format!(
                "the input of operation {number} ({}) has no value",
                node.name
            );
            let value = |input: &TensorIr| known.get(&input.id).cloned();
            let inputs: Option<Vec<_>> = node.inputs.iter().map(value).collect();
            let inputs = inputs.ok_or(missing)?;
            let rounded = inputs.into_iter().zip(&node.inputs);
            let rounded: Vec<_> = rounded
                .map(|(data, input)| data.convert_dtype(input.dtype))
                .collect();
            let mut on_cpu = |types| {
                caught(|| self.one(node, &mut oracle, &rounded, types)).and_then(|result| result)
            };
            let expected = match (on_cpu(exact), &node.what) {
                // The function creates f32 tensors.
                (Err(_), What::Call(_)) => on_cpu(in_own_types),
                (result, _) => result,
            };
            let expected = expected
                .map_err(|reason| format!("operation {number} ({}): {reason}", node.name))?;
            let found = caught(|| self.one(node, &mut tested, &rounded, own)).and_then(|it| it);
            let judge = |scale| {
                let limit = |node: &Node| Limit {
                    scale,
                    bound: units.operation(
                        node.longest_sum(),
                        node.outputs[0].dtype,
                        node.is_product(),
                    ),
                };
                let mode = ReplayMode::Single;
                self.judge(number, mode, &rounded, &expected, &found, limit)
            };
            let mut first = judge(0.0);
            if first.is_some() && node.is_sum() {
                let terms: Vec<_> = rounded.iter().map(absolute).collect();
                let of_terms = caught(|| self.one(node, &mut oracle, &terms, exact));
                if let Ok(Ok(of_terms)) = of_terms {
                    let magnitudes = of_terms.into_iter().map(|data| largest(&floats(data)));
                    first = judge(CANCELLED * magnitudes.fold(0.0, f64::max));
                }
            }
            *compared = number + 1;
            if first.is_some() {
                return Ok(first);
            }
            for (output, data) in node.outputs.iter().zip(expected) {
                known.insert(output.id, data);
            }
            known.retain(|id, _| last.get(id).is_none_or(|last| *last > number));
        }
        Ok(None)
    }

    /// Runs the operations as a sequence. Uses bisection to find the first operation whose output differs from the
    /// output on the CPU.
    ///
    /// # Errors
    ///
    /// See [`alone`](Self::alone).
    pub fn in_a_row(
        &self,
        device: &Device,
        units: &Units,
    ) -> Result<Option<FirstDifference>, String> {
        let scale = self.scale();
        let differs = |number: usize| {
            let cpu = caught(|| self.up_to(number, &Device::flex(), true)).and_then(|it| it)?;
            let found = caught(|| self.up_to(number, device, false)).and_then(|it| it);
            Ok::<_, String>(
                self.judge(number, ReplayMode::Sequence, &[], &cpu, &found, |_| Limit {
                    scale: 0.0,
                    bound: units.row(number + 1, &scale),
                }),
            )
        };
        let is_float = |node: &Node| node.outputs.iter().any(|output| output.dtype.is_float());
        let float: Vec<usize> = (0..self.len())
            .filter(|at| is_float(&self.nodes[*at]))
            .collect();
        let (mut right, mut wrong, mut first) = (0, float.len(), None);
        while right < wrong {
            let middle = (right + wrong) / 2;
            match differs(float[middle])? {
                Some(found) => (wrong, first) = (middle, Some(found)),
                None => right = middle + 1,
            }
        }
        Ok(first)
    }

    /// Runs one operation on these inputs and returns its outputs.
    fn one(
        &self,
        node: &Node,
        replay: &mut Replay,
        inputs: &[TensorData],
        types: Types,
    ) -> Result<Vec<TensorData>, String> {
        for (input, data) in node.inputs.iter().zip(inputs) {
            let dtype = types.map(input.dtype);
            replay.set(input.id, data.clone().convert_dtype(dtype));
        }
        self.run(node, replay, types)?;
        let outputs = node.outputs.iter().map(|output| types.tensor(output));
        let read: Result<Vec<_>, String> = outputs.clone().map(|it| replay.read(&it)).collect();
        node.inputs.iter().for_each(|input| replay.forget(input));
        outputs.for_each(|output| replay.forget(&output));
        read
    }

    fn run(&self, node: &Node, replay: &mut Replay, types: Types) -> Result<(), String> {
        let mapped = |tensors: &[TensorIr]| {
            tensors
                .iter()
                .map(|it| types.tensor(it))
                .collect::<Vec<_>>()
        };
        match &node.what {
            What::Operation(operation) => {
                replay.run(types.operation(operation.clone()));
                Ok(())
            }
            What::Call(call) => {
                let (inputs, outputs) = (mapped(&node.inputs), mapped(&node.outputs));
                match replay.call(&self.calls[*call], &inputs, &outputs) {
                    true => Ok(()),
                    false => Err("it cannot be run without fusion".into()),
                }
            }
        }
    }

    /// Runs all operations up to `number` and returns the outputs of operation `number`.
    fn up_to(
        &self,
        number: usize,
        device: &Device,
        exact: bool,
    ) -> Result<Vec<TensorData>, String> {
        let mut replay = replay(device, true)?;
        let types = Types::of(device, exact);
        let last = self.last_uses(number + 1);
        let mut given = std::collections::HashSet::new();
        for (at, node) in self.nodes[..=number].iter().enumerate() {
            for input in &node.inputs {
                if let Some(data) = self.values.get(&input.id)
                    && given.insert(input.id)
                {
                    let dtype = types.map(input.dtype);
                    replay.set(input.id, data.clone().convert_dtype(dtype));
                }
            }
            self.run(node, &mut replay, types)?;
            let done = node
                .inputs
                .iter()
                .filter(|input| last.get(&input.id) == Some(&at));
            done.for_each(|input| replay.forget(input));
        }
        let outputs = self.nodes[number].outputs.iter();
        outputs
            .map(|output| replay.read(&types.tensor(output)))
            .collect()
    }

    /// Returns, for each tensor, the last of the first `count` operations that reads it.
    fn last_uses(&self, count: usize) -> HashMap<TensorId, usize> {
        let nodes = self.nodes[..count].iter().enumerate();
        let uses = nodes.flat_map(|(at, node)| node.inputs.iter().map(move |it| (it.id, at)));
        uses.collect()
    }
}

/// Returns the absolute values of floats. Other data is returned unchanged.
fn absolute(data: &TensorData) -> TensorData {
    if !data.dtype().is_float() {
        return data.clone();
    }
    let values: Vec<f64> = data.iter::<f64>().map(f64::abs).collect();
    TensorData::new(values, data.shape().clone()).convert_dtype(data.dtype())
}

/// Creates a replay of the operations. With `in_a_row`, they are fused as in a program. Otherwise they run without
/// fusion, if the device supports this.
fn replay(device: &Device, in_a_row: bool) -> Result<Replay, String> {
    let alone = if in_a_row {
        None
    } else {
        Replay::unfused(device)
    };
    let replay = alone.or_else(|| Replay::new(device));
    replay.ok_or_else(|| format!("operations cannot be run one by one on {device:?}"))
}
