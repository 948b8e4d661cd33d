package suite_test

import (
	"testing"

	"pointsman/internal/testkit"
	"pointsman/internal/testkit/suite"
)

func run(t *testing.T, opts testkit.Options) {
	c := testkit.NewCluster("a", opts)
	t.Cleanup(c.Close)
	suite.Suite(t, c.ServiceURL(), suite.Options{CreatePartitioned: func(topic string, n int) error {
		c.CreateTopic(topic, n)
		return nil
	}})
}

func TestTheFakeBrokerIsWhatAClientExpects(t *testing.T) {
	run(t, testkit.Options{})
}

func TestSoAreSeveralThatRedirectAndHaveShortLedgers(t *testing.T) {
	run(t, testkit.Options{Brokers: 3, Redirects: 2, LedgerBase: 1 << 40, EntriesPerLedger: 3})
}
