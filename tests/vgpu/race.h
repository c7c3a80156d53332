// Happens-before checks of accesses to memory by streams, with vector clocks (one component a stream).
//
// A stream's clock says how much of every stream's work its next operation comes after. An event carries the clock
// of its stream when it was recorded; waiting for it joins that clock. What the host has waited for comes before
// everything enqueued later, by whichever thread: hand-overs between threads aren't visible here, so one host clock
// stands for them all, and no correct program is ever refused.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace race {
using Clock = std::vector<uint64_t>;  // index: stream id; value: how many of its operations are behind us

inline void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) if (into[i] < other[i]) into[i] = other[i];
}

struct Range { uintptr_t lo, hi; };
using Ranges = std::vector<Range>;

class Checker {
  struct Access { std::string op; int64_t stream; uint64_t tick; Range range; const char* verb; };
  using Note = std::shared_ptr<const Access>;
  struct Span { uintptr_t hi; Note write; std::vector<Note> reads; };

  std::mutex mu_;
  std::map<uintptr_t, Span> spans_;  // start -> the bytes up to hi, disjoint
  std::map<int64_t, Clock> clocks_;
  Clock host_;
  std::vector<std::string> found_;

  static uint64_t at(const Clock& c, int64_t stream) { return size_t(stream) < c.size() ? c[stream] : 0; }
  static bool behind(const Note& n, const Clock& c) { return n->tick <= at(c, n->stream); }

  Clock& clock_of(int64_t stream) {
    Clock& c = clocks_[stream];
    join(c, host_);
    if (c.size() <= size_t(stream)) c.resize(stream + 1);
    return c;
  }
  void cut(uintptr_t where) {
    auto it = spans_.upper_bound(where);
    if (it == spans_.begin()) return;
    --it;
    if (it->first == where || it->second.hi <= where) return;
    Span right = it->second;
    it->second.hi = where;
    spans_.emplace(where, std::move(right));
  }
  // Spans of the range, with boundaries cut at its ends; gaps are filled where `fill`.
  std::vector<std::map<uintptr_t, Span>::iterator> spans_in(Range r, bool fill) {
    cut(r.lo);
    cut(r.hi);
    std::vector<std::map<uintptr_t, Span>::iterator> found;
    uintptr_t next = r.lo;
    for (auto it = spans_.lower_bound(r.lo); it != spans_.end() && it->first < r.hi; ++it) {
      if (fill && next < it->first) found.push_back(spans_.emplace(next, Span{it->first, nullptr, {}}).first);
      found.push_back(it);
      next = it->second.hi;
    }
    if (fill && next < r.hi) found.push_back(spans_.emplace(next, Span{r.hi, nullptr, {}}).first);
    return found;
  }
  static std::string text(const Access& a) {
    std::ostringstream s;
    s << a.op << " on stream " << a.stream << " " << a.verb << " bytes 0x" << std::hex << a.range.lo << " to 0x"
      << a.range.hi << std::dec << " (" << a.range.hi - a.range.lo << " bytes)";
    return s.str();
  }
  std::string refuse(const Access& now, const Access& before) {
    std::ostringstream s;
    s << "vgpu race: " << text(now) << ", which isn't ordered after: " << text(before) << ". Stream " << now.stream
      << " has to wait for an event that was recorded on stream " << before.stream << " after that.";
    if (found_.size() < 1000) found_.push_back(s.str());
    return s.str();
  }

 public:
  // One operation on a stream. Returns the text of a race, in which case nothing was noted.
  std::optional<std::string> access(const std::string& op, int64_t stream, const Ranges& reads, const Ranges& writes) {
    std::lock_guard<std::mutex> g(mu_);
    Clock& c = clock_of(stream);
    const uint64_t tick = ++c[stream];
    for (const Range& r : reads)
      for (auto it : spans_in(r, false))
        if (it->second.write && !behind(it->second.write, c)) return refuse({op, stream, tick, r, "reads"}, *it->second.write);
    for (const Range& r : writes)
      for (auto it : spans_in(r, false)) {
        if (it->second.write && !behind(it->second.write, c)) return refuse({op, stream, tick, r, "writes"}, *it->second.write);
        for (const Note& n : it->second.reads) if (!behind(n, c)) return refuse({op, stream, tick, r, "writes"}, *n);
      }
    for (const Range& r : reads) {
      Note note = std::make_shared<Access>(Access{op, stream, tick, r, "reads"});
      for (auto it : spans_in(r, true)) {
        auto& all = it->second.reads;
        // What this read comes after, a later write comes after through it.
        std::vector<Note> kept;
        for (Note& n : all) if (!behind(n, c)) kept.push_back(std::move(n));
        kept.push_back(note);
        all = std::move(kept);
      }
    }
    for (const Range& r : writes) {
      forget_locked(r);
      spans_.emplace(r.lo, Span{r.hi, std::make_shared<Access>(Access{op, stream, tick, r, "writes"}), {}});
    }
    return std::nullopt;
  }
  // Memory handed out on a stream. Accesses from its life before which the stream doesn't come after stay as a debt
  // that the first write has to be ordered after; other streams have to come after the allocation.
  void allocated(Range r, int64_t stream) {
    std::lock_guard<std::mutex> g(mu_);
    Clock& c = clock_of(stream);
    Note note;
    if (c[stream]) note = std::make_shared<Access>(Access{"allocation", stream, c[stream], r, "takes"});
    for (auto it : spans_in(r, true)) {
      std::vector<Note> debt;
      for (Note& n : it->second.reads) if (!behind(n, c)) debt.push_back(std::move(n));
      if (it->second.write && !behind(it->second.write, c)) debt.push_back(std::move(it->second.write));
      it->second.reads = std::move(debt);
      it->second.write = note;
    }
  }
  // Memory given back while these streams were recorded as its users: it isn't reused before they are through.
  void freed(Range r, const std::vector<int64_t>& recorded) {
    std::lock_guard<std::mutex> g(mu_);
    for (int64_t stream : recorded)
      for (auto it : spans_in(r, false)) {
        auto& s = it->second;
        if (s.write && s.write->stream == stream) s.write = nullptr;
        std::vector<Note> kept;
        for (Note& n : s.reads) if (n->stream != stream) kept.push_back(std::move(n));
        s.reads = std::move(kept);
      }
  }
  void forget(Range r) { std::lock_guard<std::mutex> g(mu_); forget_locked(r); }
  Clock recorded_on(int64_t stream) { std::lock_guard<std::mutex> g(mu_); return clock_of(stream); }
  void stream_waits(int64_t stream, const Clock& c) { std::lock_guard<std::mutex> g(mu_); join(clock_of(stream), c); }
  void host_waits(const Clock& c) { std::lock_guard<std::mutex> g(mu_); join(host_, c); }
  void host_waits(int64_t stream) { std::lock_guard<std::mutex> g(mu_); Clock c = clock_of(stream); join(host_, c); }
  void host_waits_for_all() { std::lock_guard<std::mutex> g(mu_); for (auto& p : clocks_) join(host_, p.second); }
  std::vector<std::string> found() { std::lock_guard<std::mutex> g(mu_); return found_; }
  void clear(bool found) {
    std::lock_guard<std::mutex> g(mu_);
    spans_.clear(); clocks_.clear(); host_.clear();
    if (found) found_.clear();
  }

 private:
  void forget_locked(Range r) { for (auto it : spans_in(r, false)) spans_.erase(it); }
};
}  // namespace race
