//! Queries of the positions of ranks, for a failure report or for a rank that waits for missing ranks.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use super::message::{CallId, CoordinatorMessage, MissingRanks, RankStatus};
use super::rank_slot::is_final;
use super::registry::{Outgoing, Recipient, Registry};
use crate::auth::printable_text;
use crate::failure_report::{FailureReport, RankPosition, describe_ranks};
use crate::rank_runs::RankRuns;

/// The timeout for the ranks to answer a status query.
const QUERY_TIMEOUT: Duration = Duration::from_secs(1);
/// The time for which an answer about a call is reused for queries from other ranks.
const ANSWER_LIFETIME: Duration = Duration::from_secs(1);

/// A query that some ranks have not answered yet.
#[derive(Debug)]
pub(super) struct StatusQuery {
    purpose: QueryPurpose,
    pub waiting: BTreeSet<usize>,
    pub not_before: Duration,
    until: Duration,
    pub statuses: BTreeMap<usize, RankStatus>,
}

#[derive(Debug)]
pub(super) enum QueryPurpose {
    /// The query collects positions for a failure report.
    Report,
    /// Ranks have asked which members of a group have not joined a call.
    FindMissing {
        askers: Vec<usize>,
        call: CallId,
        members: Vec<usize>,
    },
}

impl QueryPurpose {
    fn call(&self) -> Option<CallId> {
        match self {
            Self::Report => None,
            Self::FindMissing { call, .. } => Some(*call),
        }
    }
}

impl Registry {
    /// Answers a rank that has sent a query for the members of the group that have not joined a call. A recent answer
    /// is returned immediately. Otherwise, the rank waits for a query that is in progress, or a new query is started.
    pub(super) fn find_missing(
        &mut self,
        asker: usize,
        call: CallId,
        ranks: &RankRuns,
        now: Duration,
    ) -> Outgoing {
        if let Some((until, found)) = self.answers.get(&call)
            && *until > now
        {
            return vec![answer(asker, call, found)];
        }
        for query in self.queries.values_mut() {
            match &mut query.purpose {
                QueryPurpose::FindMissing {
                    askers,
                    call: other,
                    ..
                } if *other == call => {
                    askers.push(asker);
                    return vec![];
                }
                _ => {}
            }
        }
        // An invalid list of ranks gets no answer.
        let Some(members) = ranks.within(self.size) else {
            return vec![];
        };
        let purpose = QueryPurpose::FindMissing {
            askers: vec![asker],
            call,
            members: members.clone(),
        };
        self.start_query(purpose, &members, now, now)
    }

    /// Answers a query for the ranks in `ranks` that have returned without joining a call.
    pub(super) fn find_returned(&self, asker: usize, call: CallId, ranks: &RankRuns) -> Outgoing {
        let mut ranks = ranks.within(self.size).unwrap_or_default();
        ranks.retain(|rank| self.returned_before(*rank, call) == Some(true));
        let ranks = RankRuns::new(&ranks);
        let answer = CoordinatorMessage::ReturnedBefore { call, ranks };
        vec![(Recipient::Rank(asker), answer)]
    }

    fn returned_before(&self, rank: usize, call: CallId) -> Option<bool> {
        self.slots[rank].as_ref()?.returned_before(call)
    }

    pub(super) fn start_query(
        &mut self,
        purpose: QueryPurpose,
        ranks: &[usize],
        not_before: Duration,
        now: Duration,
    ) -> Outgoing {
        let question = self.next_query;
        self.next_query += 1;
        let answers = |rank: &usize| {
            let registered = self.slots[*rank].as_ref();
            registered.is_some_and(|rank| !rank.disconnected && !is_final(&rank.position))
        };
        let waiting: BTreeSet<usize> = ranks.iter().copied().filter(answers).collect();
        let call = purpose.call();
        let queries = waiting.iter().map(|rank| {
            let query = CoordinatorMessage::QueryStatus { question, call };
            (Recipient::Rank(*rank), query)
        });
        let mut outgoing: Outgoing = queries.collect();
        self.queries.insert(
            question,
            StatusQuery {
                purpose,
                waiting,
                not_before,
                until: now + QUERY_TIMEOUT,
                statuses: BTreeMap::new(),
            },
        );
        outgoing.extend(self.finish_query(question, now));
        outgoing
    }

    /// Finishes every query that all ranks have answered or that has timed out.
    pub(super) fn finish_queries(&mut self, now: Duration) -> Outgoing {
        self.answers.retain(|_, (until, _)| *until > now);
        let questions: Vec<u64> = self.queries.keys().copied().collect();
        let finish = |question| self.finish_query(question, now);
        questions.into_iter().flat_map(finish).collect()
    }

    /// Finishes a query if all ranks have answered it or if it has timed out.
    pub(super) fn finish_query(&mut self, question: u64, now: Duration) -> Outgoing {
        let is_ready = |query: &StatusQuery| {
            now >= query.until || (query.waiting.is_empty() && now >= query.not_before)
        };
        if !self.queries.get(&question).is_some_and(is_ready) {
            return vec![];
        }
        let Some(query) = self.queries.remove(&question) else {
            return vec![];
        };
        match &query.purpose {
            QueryPurpose::Report => {
                let report = self.report_failure(&query);
                vec![(Recipient::All, CoordinatorMessage::Failure(report))]
            }
            QueryPurpose::FindMissing {
                askers,
                call,
                members,
            } => {
                let found = self.missing_ranks(&query, *call, members);
                let answers = askers.iter().map(|asker| answer(*asker, *call, &found));
                let outgoing = answers.collect();
                self.answers.insert(*call, (now + ANSWER_LIFETIME, found));
                outgoing
            }
        }
    }

    /// Creates the failure report for the cause with the highest precedence. It contains the position of every rank.
    fn report_failure(&mut self, query: &StatusQuery) -> FailureReport {
        let first = self.causes.iter().min_by_key(|(_, cause)| cause.kind);
        let (rank, cause) = first.expect("a report follows a cause");
        let position = |rank: usize| match (&self.slots[rank], query.waiting.contains(&rank)) {
            (None, _) => RankPosition::NeverJoined,
            (Some(registered), false) => registered.position.clone(),
            (Some(registered), true) => {
                let silence = query.until.saturating_sub(registered.last_message);
                let last = Box::new(registered.position.clone());
                RankPosition::NoHeartbeat(silence.as_secs(), last)
            }
        };
        let positions: Vec<RankPosition> = (0..self.size).map(position).collect();
        let report = FailureReport {
            rank: *rank,
            message: cause.message.clone(),
            // Truncated before it is sent to all ranks.
            positions: printable_text(&describe_ranks(&positions)),
        };
        self.failure = Some((cause.kind, report.clone()));
        report
    }

    fn missing_ranks(&self, query: &StatusQuery, call: CallId, members: &[usize]) -> MissingRanks {
        let joined = |rank: &usize| match self.returned_before(*rank, call) {
            Some(before) => !before,
            None => query.statuses.get(rank).is_some_and(|status| status.joined),
        };
        let absent: Vec<usize> = members
            .iter()
            .copied()
            .filter(|rank| !joined(rank))
            .collect();
        let mut calls: Vec<(String, Vec<usize>)> = vec![];
        let mut index: HashMap<&str, usize> = HashMap::new();
        for (rank, status) in &query.statuses {
            let Some(text) = &status.call else { continue };
            let place = *index.entry(text).or_insert_with(|| {
                calls.push((text.clone(), vec![]));
                calls.len() - 1
            });
            calls[place].1.push(*rank);
        }
        let calls = calls.into_iter();
        MissingRanks {
            absent: RankRuns::new(&absent),
            calls: calls
                .map(|(text, ranks)| (text, RankRuns::new(&ranks)))
                .collect(),
        }
    }
}

fn answer(asker: usize, call: CallId, found: &MissingRanks) -> (Recipient, CoordinatorMessage) {
    let found = found.clone();
    let message = CoordinatorMessage::MissingRanks { call, found };
    (Recipient::Rank(asker), message)
}
