//! Comparison of a layer on several tensor ranks with one rank.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, Gradients, Tensor};

use super::{assemble, assert_close, autodiff, filled, in_layout, leaf, part, values, wave};
use crate::comm::ParallelContext;
use crate::mesh::{Axis, ParallelConfig};
use crate::nn::{
    AxisRank, BuildError, LocalSection, ModelBuilder, ParameterEntry, ParameterTable, Placement,
};

/// The placement of a tensor, as a function of the number of ranks.
pub type PlacementFor<'a> = &'a (dyn Fn(usize) -> Placement + Sync);

/// A tensor of the comparison, with its full shape and its placement.
pub struct TestTensor<'a> {
    pub shape: [usize; 3],
    pub placement: PlacementFor<'a>,
}

/// A layer with its inputs and outputs.
pub struct Case<'a, M> {
    pub input: TestTensor<'a>,
    pub output: TestTensor<'a>,
    pub build: &'a (dyn Fn(&ModelBuilder) -> Result<M, BuildError> + Sync),
    pub forward: &'a (dyn Fn(&M, Tensor<3>) -> Tensor<3> + Sync),
}

/// The results of a case, assembled from the parts of all ranks.
struct Assembled {
    output: Vec<f64>,
    input_gradient: Vec<f64>,
    /// The path, the initial values and the gradient of each parameter.
    parameters: Vec<(String, Vec<f64>, Vec<f64>)>,
}

struct RankResult {
    table: ParameterTable,
    output: Vec<f64>,
    input_gradient: Vec<f64>,
    initial: Vec<Vec<f64>>,
    gradients: Vec<Vec<f64>>,
}

pub fn replicated(_ranks: usize) -> Placement {
    Placement::Replicated
}

impl<M: Module> Case<'_, M> {
    /// Checks that two and four ranks give the result of one rank.
    pub fn check(&self, what: &str) {
        self.check_in(what, |ranks| ParallelConfig::new().with_tensor(ranks));
    }

    /// Checks these layouts, given as a function of the number of tensor ranks.
    pub fn check_in(&self, what: &str, layout: impl Fn(usize) -> ParallelConfig) {
        let one = self.run(&ParallelConfig::new());
        for ranks in [2, 4] {
            let many = self.run(&layout(ranks));
            let what = format!("{what} on {ranks} ranks");
            assert_close(&format!("{what}: output"), &many.output, &one.output);
            let found = &many.input_gradient;
            assert_close(
                &format!("{what}: input gradient"),
                found,
                &one.input_gradient,
            );
            assert_eq!(many.parameters.len(), one.parameters.len());
            for (found, expected) in many.parameters.iter().zip(&one.parameters) {
                let ((path, initial, gradient), (_, one, one_gradient)) = (found, expected);
                assert_eq!(initial, one, "{what}: initial {path}");
                assert_close(
                    &format!("{what}: gradient of {path}"),
                    gradient,
                    one_gradient,
                );
            }
        }
    }

    fn run(&self, layout: &ParallelConfig) -> Assembled {
        let ranks = layout.tensor;
        let all = in_layout(layout, |groups| self.run_rank(&groups));
        let table = &all[0].table;
        assert!(
            all.iter().all(|outcome| outcome.table == *table),
            "one table on every rank"
        );
        let join = |placement: Placement, shape: &[usize], parts: Vec<Vec<f64>>| {
            if placement == Placement::Replicated {
                assert!(
                    parts.iter().all(|part| *part == parts[0]),
                    "all ranks have the same"
                );
            }
            assemble(&placement, shape, &parts)
        };
        let collect = |of: &dyn Fn(&RankResult) -> Vec<f64>| all.iter().map(of).collect::<Vec<_>>();
        let parameters = table.entries().iter().enumerate().map(|(i, entry)| {
            let placement = || entry.placements.on(Axis::Tensor).clone();
            let initial = collect(&|outcome| outcome.initial[i].clone());
            let gradients = summed(entry, &collect(&|outcome| outcome.gradients[i].clone()));
            (
                entry.path.clone(),
                join(placement(), &entry.shape, initial),
                join(placement(), &entry.shape, gradients),
            )
        });
        let of = |shared: &TestTensor, parts| join((shared.placement)(ranks), &shared.shape, parts);
        Assembled {
            output: of(&self.output, collect(&|outcome| outcome.output.clone())),
            input_gradient: of(
                &self.input,
                collect(&|outcome| outcome.input_gradient.clone()),
            ),
            parameters: parameters.collect(),
        }
    }

    fn run_rank(&self, groups: &ParallelContext) -> RankResult {
        let place = groups.place();
        let builder = ModelBuilder::with(groups, &autodiff(), 7, DType::F64);
        let module = (self.build)(&builder).unwrap();
        builder.position().set(3, 5);
        let model = builder.finish(module).unwrap();
        let initial = elements(&model.module, None);
        let module = filled(model.module, &model.table, place);

        let x = part(
            wave(self.input.shape, 0.5),
            &(self.input.placement)(place.size),
            place,
        );
        let x = leaf(x);
        let y = (self.forward)(&module, x.clone());
        let weight = self.loss_weight(place);
        assert_eq!(y.dims(), weight.dims(), "the output of this rank");
        let gradients = (y.clone() * Tensor::from_inner(weight)).sum().backward();
        RankResult {
            table: model.table,
            output: values(y.inner()),
            input_gradient: values(x.grad(&gradients).unwrap()),
            initial,
            gradients: elements(&module, Some(&gradients)),
        }
    }

    /// Returns the factors of the loss `sum(output * factor)`. Elements that are replicated on several ranks count
    /// once.
    fn loss_weight(&self, place: AxisRank) -> Tensor<3> {
        let placement = (self.output.placement)(place.size);
        let weight = part(wave(self.output.shape, 4.0), &placement, place);
        let Placement::Split { dim, .. } = placement else {
            return weight;
        };
        let share = |LocalSection { local, section, .. }| {
            let stretch = weight.clone().narrow(dim, local.start, local.len());
            stretch.div_scalar(section.replicas(place.size) as f64)
        };
        Tensor::cat(
            placement
                .local_sections(place)
                .into_iter()
                .map(share)
                .collect(),
            dim,
        )
    }
}

/// Returns the gradients after the summation over the tensor axis that the table requires.
fn summed(entry: &ParameterEntry, parts: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let place = |index| AxisRank {
        index,
        size: parts.len(),
    };
    // Returns whether two ranks hold replicas of element `i`, whose gradients are summed.
    let together = |a: usize, b: usize, i: usize| match entry.placements.on(Axis::Tensor) {
        Placement::Replicated => a == b || entry.sum_over.contains(Axis::Tensor),
        split @ Placement::Split { dim, .. } => {
            let local = entry.placements.local_shape(&entry.shape, |_| place(a));
            let at = i / local[dim + 1..].iter().product::<usize>() % local[*dim];
            let sections = split.local_sections(place(a)).into_iter();
            let mut found = sections.filter(|section| section.local.contains(&at));
            let section = found.next().unwrap().section;
            section.range(place(a)) == section.range(place(b))
        }
    };
    let sum = |a: usize, i: usize| {
        let ranks = (0..parts.len()).filter(|b| together(a, *b, i));
        ranks.map(|b| parts[b][i]).sum()
    };
    (0..parts.len())
        .map(|a| (0..parts[a].len()).map(|i| sum(a, i)).collect())
        .collect()
}

/// Returns the elements of each parameter or of its gradient, in table order.
pub fn elements<M: Module>(module: &M, gradients: Option<&Gradients>) -> Vec<Vec<f64>> {
    let mut visitor = ValueVisitor {
        gradients,
        found: vec![],
    };
    module.visit(&mut visitor);
    visitor.found
}

struct ValueVisitor<'a> {
    gradients: Option<&'a Gradients>,
    found: Vec<Vec<f64>>,
}

impl ModuleVisitor for ValueVisitor<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.val();
        self.found.push(match self.gradients {
            Some(gradients) => values(value.grad(gradients).expect("a gradient")),
            None => values(value.inner()),
        });
    }
}
