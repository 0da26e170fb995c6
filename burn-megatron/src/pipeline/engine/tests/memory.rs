//! Tests of the lifetime of activations in a run.

use std::sync::Weak;

use burn::backend::Flex;

use super::*;

#[test]
fn one_stage_keeps_one_micro_batch() {
    let schedule = schedule(ScheduleKind::OneFOneB, 1, 8);
    assert_eq!(run(&schedule, &even(8), |run, _| run.peak_activations), [1]);
}

#[test]
fn no_more_activations_are_kept_than_the_validator_says() {
    for kind in ScheduleKind::ALL {
        for (ranks, micro_batches) in [(2, 4), (4, 8), (4, 12)] {
            let schedule = schedule(kind, ranks, micro_batches);
            let peaks = run(&schedule, &even(micro_batches), |run, _| {
                run.peak_activations
            });
            let expected = validate(&schedule).unwrap().peak_activations;
            assert_eq!(peaks, expected, "{kind}, {ranks} ranks");
        }
    }
}

type Watched = Box<dyn Fn() -> bool + Send>;

/// Returns a handle that reports whether the memory of a tensor is still allocated.
fn watch(tensor: &Tensor<3>) -> Watched {
    let primitive = tensor.clone().inner().try_into_primitive::<Flex>().unwrap();
    let weak = Arc::downgrade(&primitive.data_arc());
    Box::new(move || Weak::upgrade(&weak).is_some())
}

/// A chain whose inputs and outputs are watched.
struct Watching {
    chain: Chain,
    inputs: Mutex<Vec<Watched>>,
    outputs: Mutex<Vec<Watched>>,
    /// The inputs and outputs of earlier forwards that are still allocated at each forward.
    alive: Mutex<Vec<Alive>>,
}

fn alive(watched: &Mutex<Vec<Watched>>) -> usize {
    let watched = watched.lock().unwrap();
    watched.iter().filter(|is_there| is_there()).count()
}

impl Stage for Watching {
    fn forward(&self, stage: usize, micro_batch: usize, given: Option<Tensor<3>>) -> StageOutput {
        let now = (alive(&self.inputs), alive(&self.outputs));
        self.alive.lock().unwrap().push(now);
        if let Some(x) = &given {
            self.inputs.lock().unwrap().push(watch(x));
        }
        let output = self.chain.forward(stage, micro_batch, given);
        if let StageOutput::Activation(y) = &output {
            self.outputs.lock().unwrap().push(watch(y));
        }
        output
    }

    fn after_backward(&self, stage: usize, micro_batch: usize, leaves: &mut Gradients) {
        self.chain.after_backward(stage, micro_batch, leaves);
    }
}

/// The numbers of inputs and outputs that are still allocated.
type Alive = (usize, usize);

/// Returns the allocated tensors of each rank at each forward and after the run.
fn watched(kind: ScheduleKind) -> Vec<(Vec<Alive>, Alive)> {
    let schedule = schedule(kind, 4, 8);
    let world = World::threads(4).unwrap();
    let ranks = world.run(|rank| {
        let comm = rank.communicator();
        let chain = Chain::new(&schedule, comm.rank(), &even(8));
        let sums = chain.sums.clone();
        let model = Watching {
            chain,
            inputs: Mutex::default(),
            outputs: Mutex::default(),
            alive: Mutex::default(),
        };
        let engine = Engine::new(&schedule, &comm, &Device::flex(), sums.clone())?;
        engine.run(&model)?;
        let at_forwards = model.alive.lock().unwrap().clone();
        let after = (alive(&model.inputs), alive(&model.outputs));
        Ok::<_, RankError>((at_forwards, after))
    });
    ranks.unwrap()
}

#[test]
fn an_output_is_freed_once_sent_while_its_graph_lives() {
    for (rank, (at_forwards, _)) in watched(ScheduleKind::GPipe).into_iter().enumerate() {
        // All forwards run first, so each keeps its input, but not its output.
        let inputs = if rank == 0 { 0 } else { 1 };
        let expected: Vec<_> = (0..8).map(|before| (inputs * before, 0)).collect();
        assert_eq!(at_forwards, expected, "rank {rank}");
    }
}

#[test]
fn nothing_is_kept_after_a_run() {
    for kind in ScheduleKind::ALL {
        for (rank, (_, after)) in watched(kind).into_iter().enumerate() {
            assert_eq!(after, (0, 0), "{kind}, rank {rank}");
        }
    }
}
